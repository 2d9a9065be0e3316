"""`make docs`: write the tables of the documentation anew from what they speak of."""

from pathlib import Path

from hf_posenc.patching.grades import table_markdown

BEGIN, END = "<!-- table -->", "<!-- /table -->"


def main() -> None:
    readme = Path(__file__).parent.parent / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    readme.write_text(f"{before}{BEGIN}\n{table_markdown()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
