"""What a recipe may say, key by key."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from ..core.lengths import parsed_length, parsed_lengths
from ..errors import suggestion
from ..schemes import SCHEMES
from ..schemes.plans import is_plan, plan_from


def length_of(value: Any) -> Any:
    """Tokens as the command line writes them: 4096 or 4k."""
    return parsed_length(value) if isinstance(value, str) else value


def lengths_of(value: Any) -> Any:
    """One length or several, as a list or with commas."""
    if isinstance(value, str):
        return parsed_lengths(value)
    return [value] if isinstance(value, int) else value


LENGTHS = ("target_length", "trained_length")
"""Options of a scheme that are lengths."""
OF_THE_PATCH = ("existing", "layer_types")
"""What `patch_model` takes beside the options of a scheme."""
Length = Annotated[int, BeforeValidator(length_of)]
Lengths = Annotated[list[Length], BeforeValidator(lengths_of)]


class Section(BaseModel):
    # Strict: "1e-3" in quotes is no number, and a key that nobody reads is an error, not a comment.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelSettings(Section):
    """The model that is tuned: one that exists, or a fresh one."""

    path: str | None = None
    """A folder, a hub name, or `tiny`, the model inside this package."""
    config: dict[str, Any] | None = None
    """Instead of a path: the config of a new, random model, which is trained from nothing."""
    tokenizer: str | None = None
    """Where the tokenizer is; beside the model unless given."""
    objective: Literal["causal", "masked", "contrastive"] = "causal"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the model computes in and is written in. What is trained is held in float32 in either case."""
    attn_implementation: str | None = None
    trust_remote_code: bool = False

    @field_validator("dtype", mode="before")
    @classmethod
    def holds_gradients(cls, dtype: Any) -> Any:
        if dtype == "float16":
            raise ValueError("gradients vanish in float16 without loss scaling: take bfloat16, or float32")
        return dtype

    @model_validator(mode="after")
    def one_model(self) -> ModelSettings:
        if (self.path is None) == (self.config is None):
            raise ValueError("name either a model (path) or the config of a fresh one (config)")
        if self.config is not None and (self.tokenizer is None or "model_type" not in self.config):
            raise ValueError("a fresh model needs tokenizer, and model_type in its config")
        return self


class SchemeSettings(BaseModel):
    """A scheme's name and its own options, which the scheme checks. Without a name nothing is patched: a control."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    name: str | None = None

    @field_validator("name")
    @classmethod
    def known(cls, name: str | None) -> str | None:
        if name is not None and not is_plan(name) and name not in SCHEMES:
            raise ValueError(f"unknown scheme {name!r}.{suggestion(name, list(SCHEMES))}")
        return name

    @model_validator(mode="after")
    def options_have_a_scheme(self) -> SchemeSettings:
        if self.name is None and self.options:
            raise ValueError(f"options {sorted(self.options)} without a scheme's name")
        own = {k: v for k, v in self.options.items() if k not in OF_THE_PATCH}
        if self.name is not None and is_plan(self.name):
            plan_from(self.name, own)
        elif self.name is not None:
            SCHEMES[self.name].from_options(own)
        return self

    @property
    def options(self) -> dict[str, Any]:
        given = dict(self.model_extra or {})
        return {key: length_of(value) if key in LENGTHS else value for key, value in given.items()}


class Pose(Section):
    """PoSE: rows of `data.length` whose positions skip, so that they reach up to `target_length`."""

    target_length: Length = Field(gt=0)
    chunks: int = Field(default=2, ge=2)


class Randomized(Section):
    """Sorted random positions below `target_length` (Ruoss et al. 2023). Good on algorithmic tasks, bad for language:
    for texts take PoSE, whose tokens keep their neighbours."""

    target_length: Length = Field(gt=0)


class Short(Section):
    """A share of the rows is made of short pieces, so that the model does not forget short texts."""

    share: float = Field(gt=0, lt=1)
    length: Length = Field(gt=1)


class Stage(Section):
    """Some steps at a length of their own."""

    length: Length = Field(gt=1)
    steps: int = Field(gt=0)


class LongDocuments(Section):
    """Documents from so many tokens on are read more often, so that a model meets what long rows are for."""

    tokens: int = Field(gt=1)
    weight: float = Field(gt=1)
    """How often, against others."""


class Source(Section):
    """Where text comes from, and what its records are."""

    path: str | list[str] = "stdlib"
    """`stdlib`, files (.txt, .jsonl, .parquet, patterns such as books/*.txt), or the name of a dataset."""
    name: str | None = None
    """The configuration of a dataset that has several."""
    split: str = "train"
    format: Literal["text", "prompt_completion", "chat"] = "text"
    """`prompt_completion` and `chat` predict completions and the assistant's turns alone; examples stay whole."""
    column: str = "text"
    """Of text."""
    prompt: str = "prompt"
    """The column of prompts."""
    completion: str = "completion"
    """The column of completions."""
    messages: str = "messages"
    """The column of chats: lists of {role, content}, rendered by the tokenizer's own template."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """What becomes of examples that are longer than a row: cut, they would teach answers that do not end."""
    streaming: bool | None = None
    """Read while training, in order. Unless given, where the text is too large to be held as tokens."""


class WeightedSource(Source):
    """One of several."""

    weight: float = Field(default=1.0, gt=0)
    """The share of rows that come from it, against the weights of the others."""


class DataSettings(Source):
    """Text, and how rows are cut from it."""

    sources: list[WeightedSource] = []
    """Instead of `path` and what belongs to it: several, with weights."""
    long_documents: LongDocuments | None = None
    held_out: float = Field(default=0.05, gt=0, lt=0.5)
    """The share that is not trained on, but measured."""
    length: Length = Field(gt=1)
    """Tokens in a row: 4096 or 4k."""
    documents: Literal["separate", "joined"] = "separate"
    """`separate`: positions restart at a document's border and attention does not cross it. `joined`: one stream."""
    passkey: float = Field(default=0.0, ge=0, lt=1)
    """The share of rows that hide a number and ask for it. Retrieval figures are then task-trained."""
    answer_weight: float = Field(default=1.0, ge=1)
    """How much a token of such a number counts, against others."""
    short: Short | None = None
    pose: Pose | None = None
    randomized: Randomized | None = None
    stages: list[Stage] = []
    """Lengths one after the other; the last is `length`, for the steps that are left."""
    mask_share: float = Field(default=0.15, gt=0, lt=1)
    """Of masked language modelling."""

    @model_validator(mode="after")
    def one_way_to_say_it(self) -> DataSettings:
        given = self.model_fields_set & set(Source.model_fields)
        if self.sources and given:
            raise ValueError(f"{', '.join(sorted(given))} beside sources: say it of each source")
        return self

    @model_validator(mode="after")
    def examples_stay_whole(self) -> DataSettings:
        if all(source.format == "text" for source in self.all_sources):
            return self
        cut = [key for key in ("pose", "randomized", "short", "stages") if getattr(self, key)]
        if cut:
            raise ValueError(f"{', '.join(cut)} would cut prompts from what answers them: they are for text")
        if self.documents == "joined":
            raise ValueError("an answer must not read the prompt of another: documents: separate")
        return self

    @model_validator(mode="after")
    def long_documents_are_known(self) -> DataSettings:
        if self.long_documents and any(s.streaming or s.format != "text" for s in self.all_sources):
            raise ValueError("long_documents are found among all texts: format: text, streaming: false")
        return self

    @model_validator(mode="after")
    def fits(self) -> DataSettings:
        for name in self.skipped:
            target = getattr(self, name).target_length
            if target <= self.length:
                raise ValueError(f"{name}.target_length {target} must exceed length {self.length}")
            if self.stages:
                raise ValueError(f"{name} and stages are two ways to the same end: take one")
            if self.documents == "separate":
                raise ValueError(f"{name} skips positions within a row, which must be of one piece: documents: joined")
        if len(self.skipped) > 1:
            raise ValueError("pose and randomized are two ways to the same end: take one")
        if self.short and self.short.length >= self.length:
            raise ValueError(f"short.length {self.short.length} must be less than length {self.length}")
        return self

    @property
    def all_sources(self) -> list[WeightedSource]:
        """What is read, and how often."""
        if self.sources:
            return list(self.sources)
        return [WeightedSource(**{key: getattr(self, key) for key in Source.model_fields})]

    @property
    def lengths(self) -> list[int]:
        """All lengths of rows, in order."""
        return [*(stage.length for stage in self.stages), self.length]

    @property
    def reach(self) -> int:
        """The farthest that positions go."""
        return max(self.lengths) if not self.skipped else int(getattr(self, self.skipped[0]).target_length)

    @property
    def skipped(self) -> list[str]:
        """What leaves positions out within a row."""
        return [name for name in ("pose", "randomized") if getattr(self, name) is not None]


class LoraSettings(Section):
    r: int = Field(default=16, gt=0)
    lora_alpha: float = Field(default=32.0, gt=0)
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: Literal["attention", "all-linear"] | list[str] = "attention"
    use_rslora: bool = False
    """Scale by the root of the rank (rsLoRA), so that high ranks learn as they should."""
    use_dora: bool = False
    """Train the size of each weight's columns apart from their direction (DoRA)."""


class TuneSettings(Section):
    """What is trained. LoRA alone fails at large factors: norms and embeddings belong to it."""

    lora: LoraSettings | None = LoraSettings()
    """Null: what follows is trained by itself."""
    norms: bool = True
    embeddings: bool = True
    positions: Literal["all", "new", "none"] = "all"
    """The parameters that the scheme brought: all, only rows that the model had not, or none."""
    whole: bool = False
    """Every parameter, instead of all this."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Of norms, embeddings and positions; the adapters' own unless given."""

    @model_validator(mode="before")
    @classmethod
    def whole_is_without_lora(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and raw.get("whole"):
            if raw.get("lora") is not None:
                raise ValueError("whole trains every parameter, and lora would leave them alone: take one of them")
            return {**raw, "lora": None}
        return raw


class TrainSettings(Section):
    """Keys and meanings of transformers' TrainingArguments."""

    max_steps: int = Field(gt=0)
    max_seconds: float | None = Field(default=None, gt=0)
    """Stop after so long, with the schedule as far as it is: for demonstrations."""
    per_device_train_batch_size: int = Field(default=1, gt=0)
    gradient_accumulation_steps: int = Field(default=1, gt=0)
    learning_rate: float = Field(default=2e-4, gt=0)
    lr_scheduler_type: Literal["constant_with_warmup", "cosine", "linear", "constant"] = "constant_with_warmup"
    warmup_steps: int = Field(default=20, ge=0)
    """20, or half of the steps where they are few, unless given."""
    weight_decay: float = Field(default=0.0, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    max_grad_norm: float = Field(default=1.0, ge=0)
    bf16: bool = False
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them, but for what attention gave."""
    recompute_attention: bool = False
    """That as well: less memory, more time."""
    mlp_tokens: int | None = Field(default=None, gt=0)
    """Take the MLP of a row in parts of so many tokens: for rows whose MLP is what does not fit."""
    offload: bool = False
    """Keep the inputs of recomputed layers in the memory of the host."""
    logging_steps: int = Field(default=10, gt=0)
    save_steps: int = Field(default=100, gt=0)
    save_total_limit: int = Field(default=2, ge=2)
    """At least two, so that there is one to go back to when the newest is damaged."""
    report_to: Literal["none", "tensorboard", "wandb"] = "none"
    optim: Literal[
        "adamw_torch", "adamw_torch_fused", "adamw_torch_8bit", "adamw_8bit", "paged_adamw_8bit", "adafactor"
    ] = "adamw_torch_fused"
    """`adamw_torch_8bit` needs torchao, `adamw_8bit` and `paged_adamw_8bit` bitsandbytes."""
    eval_steps: int | None = Field(default=None, gt=0)
    """Take the loss of rows that are held out every so many steps."""
    eval_rows: int = Field(default=16, gt=0)
    load_best_model_at_end: bool = False
    """Keep the checkpoint with the lowest such loss, and end with it."""
    early_stopping_patience: int | None = Field(default=None, gt=0)
    """Stop when it did not fall so many times in a row."""
    generate_steps: int | None = Field(default=None, gt=0)
    """Continue texts of the target length every so many steps, and show what is written."""
    use_cpu: bool | None = None
    """Where nothing else is found, unless given."""
    seed: int = 0
    full_logits: bool = False
    """Let the model compute its loss from all logits at once, which takes far more memory."""
    processes: int | None = Field(default=None, gt=0)
    """Refuse to start unless so many processes share the work."""

    @model_validator(mode="after")
    def looks_before_it_judges(self) -> TrainSettings:
        judging = [key for key in ("load_best_model_at_end", "early_stopping_patience") if getattr(self, key)]
        if judging and self.eval_steps is None:
            raise ValueError(f"{judging[0]} goes by the loss of rows that are held out: set eval_steps")
        if self.load_best_model_at_end and self.save_steps % (self.eval_steps or 1):
            raise ValueError(
                f"the best of the checkpoints is looked for: save_steps {self.save_steps} must be a multiple of "
                f"eval_steps {self.eval_steps}"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def few_steps(cls, raw: Any) -> Any:
        steps = raw.get("max_steps") if isinstance(raw, dict) else None
        return {"warmup_steps": min(20, steps // 2), **raw} if type(steps) is int and steps > 0 else raw

    @model_validator(mode="after")
    def recomputes_what_it_must(self) -> TrainSettings:
        asked = [key for key in ("recompute_attention", "mlp_tokens", "offload") if getattr(self, key)]
        if asked and not self.gradient_checkpointing:
            raise ValueError(f"{asked[0]} is a part of gradient_checkpointing: set it")
        return self

    @model_validator(mode="after")
    def warms_up_in_time(self) -> TrainSettings:
        if self.warmup_steps > self.max_steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} exceed max_steps {self.max_steps}: the rate would never be reached"
            )
        return self


class MeasureSettings(Section):
    """What is measured, before and after."""

    path: str | list[str] | None = None
    """Text to measure on, as `data.path`; what `data` holds out, unless given."""
    lengths: Lengths = []
    """`[256, 512]` or `256,512`. The trained length, twice, four times ... up to the target, unless given."""
    windows: int = Field(default=32, gt=0)
    """Of held-out text; for embedders, documents to search."""
    scored: int = Field(default=64, gt=0)
    before: bool = True
    """Also the model as it came and as it is patched; false: only what comes of the run."""
    passkeys: int = Field(default=0, ge=0)
    """Trials of passkey retrieval at each length, by generation; a multiple of five."""

    @field_validator("passkeys")
    @classmethod
    def fives(cls, count: int) -> int:
        if count % 5:
            raise ValueError(f"five depths are tried alike, so a multiple of 5, not {count}")
        return count


class Settings(Section):
    """A whole recipe."""

    model: ModelSettings
    scheme: SchemeSettings = SchemeSettings()
    data: DataSettings
    tune: TuneSettings = TuneSettings()
    train: TrainSettings
    measure: MeasureSettings = MeasureSettings()
    output: str

    def of_run(self) -> dict[str, Any]:
        """What makes a run the one that it is: all but where it is written."""
        return self.model_dump(exclude={"output"})

    @model_validator(mode="after")
    def fresh_is_whole(self) -> Settings:
        if self.model.config is not None and not self.tune.whole:
            raise ValueError("a fresh model has nothing yet that an adapter could rest on: set tune.whole: true")
        return self

    @model_validator(mode="after")
    def answers_are_continuations(self) -> Settings:
        other = next((source.format for source in self.data.all_sources if source.format != "text"), None)
        if other is not None and self.model.objective != "causal":
            raise ValueError(f"data.format: {other} is for model.objective: causal, not {self.model.objective}")
        return self
