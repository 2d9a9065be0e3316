"""The entry point of `hf-posenc` and of `python -m hf_posenc`."""

import sys

from .extras import missing_package

NEEDED = ("typer", "rich")


def main() -> None:
    try:
        from .cli.main import app
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        sys.exit(f"hf-posenc: {missing_package(error.name, 'cli', 'The command line')}")
    app(prog_name="hf-posenc")


if __name__ == "__main__":
    main()
