"""transformers: a Trainer with methods to override where it saves, counts targets and splits texts over processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR


class WatchedTrainer(Trainer):
    """Calls `state_to_save`, `after_save`, `after_checkpoint` and `shared_inputs`, and counts targets correctly."""

    next_token = False
    """Whether each token predicts the label of the next one, so that the first label of a row is not a target."""
    _knows_targets = False

    def state_to_save(self, state: Any) -> Any:
        """The state dict to write instead of this one; None means the model's own."""
        return state

    def after_save(self, folder: Path) -> None:
        """Runs after a model or its adapters were written, in one process."""

    def after_checkpoint(self, folder: Path) -> None:
        """Runs after a checkpoint is complete, in every process."""

    def shared_inputs(self, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """How several processes split one text: a context that splits it, and the split inputs. None leaves it to
        transformers, which allows context parallelism only for the attention named `sdpa`.
        """
        return None

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, self.state_to_save(state_dict))
        self.after_save(Path(output_dir or str(self.args.output_dir)))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial=trial))
        self.after_checkpoint(folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")

    def _prepare_context_parallel_inputs(self, model: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        own = self.shared_inputs(inputs)
        return super()._prepare_context_parallel_inputs(model, inputs) if own is None else own

    @property
    def _loss_shifts_labels(self) -> bool:
        return self.next_token

    @_loss_shifts_labels.setter
    def _loss_shifts_labels(self, found: bool) -> None:
        """Ignores the value: transformers derives it from the loss of the model's class, which is not used here."""
        self._knows_targets = True

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """Before transformers 5.10 the Trainer also counts the first label of each row, which is not a target."""
        if self.next_token and not self._knows_targets:
            batch_samples = [_without_first_label(batch) for batch in batch_samples]
        return super()._get_num_items_in_batch(batch_samples, device)


def _without_first_label(batch: Any) -> Any:
    return {**batch, "labels": batch["labels"][..., 1:]} if "labels" in batch else batch
