"""How a checkpoint's hidden states become results, as its files and the options say. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine_svc.core.facts import GENERATE

# Model types whose tokens see all others of their prompt.
ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert")
_METHODS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_lasttoken": "last",
}
# Names in sentence-transformers' newer files and in options.
_METHOD_NAMES = {"cls": "cls", "mean": "mean", "max": "max", "mean_sqrt_len_tokens": "mean_sqrt_len",
                 "lasttoken": "last", "last": "last"}  # fmt: skip
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
# What architectures call the width of their hidden states.
_WIDTHS = ("hidden_size", "dim", "n_embd", "d_model")
_POOLER_CONFIG = ("pooling_type", "normalize", "use_activation")
# Keys of config.json that options may give.
_OVERRIDES = (
    "architectures", "classifier_from_token", "is_matryoshka", "is_original_qwen3_reranker",
    "matryoshka_dimensions", "method",
)  # fmt: skip
# How logits of tokens become classes: from a pair the second less the first, or each by itself.
_OF_A_PAIR, _OF_EACH = "from_2_way_softmax", "no_post_processing"


class PoolingFilesError(ValueError):
    """The folder's model cannot pool as it is to; the message is for the person who chose it."""


@dataclass(frozen=True, slots=True)
class PoolingOptions:
    """How to use a checkpoint, as the options of the same names. pooler_config, hf_overrides: JSON."""

    runner: str = "auto"
    convert: str = "auto"
    pooler_config: str | None = None
    hf_overrides: str | None = None


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """Which results a model computes from hidden states, and how.

    tasks: names as in Ready.supported_tasks, with "generate" where it samples tokens too.
    head: "embed", "classify" or "token_classify".
    method: which token states make the vector: cls, last, mean, max or mean_sqrt_len.
    dense: folders of projections that follow, in order.
    dimensions: to which a vector can be cut; (): to any, None: to none.
    num_dimensions: of an uncut vector.
    activates: whether classes are probabilities where a request does not say; False: logits.
    problem_type: of a classifier, as in config.json.
    class_tokens: whose logits after the prompt make the classes; (): the checkpoint has a head for classes.
    compares_tokens: the only class is the logit of the second of two less that of the first.
    """

    tasks: tuple[str, ...]
    head: str
    is_encoder: bool
    method: str
    num_dimensions: int
    dense: tuple[str, ...] = ()
    normalizes: bool = True
    activates: bool = True
    max_length: int | None = None
    dimensions: tuple[int, ...] | None = None
    num_classes: int = 0
    problem_type: str | None = None
    class_tokens: tuple[str, ...] = ()
    compares_tokens: bool = False

    @property
    def has_score_head(self) -> bool:
        """Whether it is a decoder whose checkpoint has a head for classes."""
        return not self.is_encoder and self.head != "embed" and not self.class_tokens


def read_pooling_spec(folder: Path, options: PoolingOptions | None = None) -> PoolingSpec | None:
    """The spec of a folder's model; None for one that generates alone, or whose config.json says nothing.

    What is wrong with a config.json is said where the model is loaded. Raises PoolingFilesError for other
    files that are unreadable, modules that are not known and options that do not fit.
    """
    options = options or PoolingOptions()
    if not (folder / "config.json").is_file():
        return None
    try:
        config = _read(folder / "config.json")
    except PoolingFilesError:
        return None
    config |= _object(options.hf_overrides, "hf_overrides", _OVERRIDES)
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else ""
    if not isinstance(architecture, str):
        return None
    makes_tokens = architecture.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))
    is_encoder = config.get("model_type") in ENCODERS and not makes_tokens
    modules = _Modules.of(folder)
    class_tokens, compares_tokens = _class_tokens(folder, config)
    if class_tokens and is_encoder:
        raise PoolingFilesError(f"{folder}: classifier_from_token is of decoders, {architecture} is none")
    head = "classify" if class_tokens else _head_of(architecture)
    pools = is_encoder or modules.is_stated or head != "embed" or not (makes_tokens or not architecture)
    runner = options.runner if options.runner != "auto" else "pooling" if pools else GENERATE
    if runner == GENERATE and options.convert in ("auto", "none"):
        return None
    if options.convert in ("embed", "classify"):
        head = "embed" if options.convert == "embed" else head
        if options.convert != head:
            raise PoolingFilesError(f"convert is {options.convert}, but {architecture} has no such head")
    pooler = _pooler_config(options.pooler_config)
    num_classes = _num_classes(config)
    if class_tokens:
        num_classes = 1 if compares_tokens else len(class_tokens)
    tasks = {
        "embed": ("embed", "token_embed"),
        "classify": ("classify", "score") if num_classes == 1 else ("classify",),
        "token_classify": ("token_classify",),
    }[head]
    width = modules.width or next((config[name] for name in _WIDTHS if config.get(name)), None)
    if type(width) is not int or width < 1:
        if options.runner == "pooling" or options.convert in ("embed", "classify"):
            names = " or ".join(_WIDTHS)
            raise PoolingFilesError(f"{folder}/config.json: {names} is {width!r}, must be a positive number")
        return None
    is_plain = not modules.is_stated
    return PoolingSpec(
        tasks=(GENERATE, *tasks) if runner == GENERATE else tasks,
        head=head,
        is_encoder=is_encoder,
        method=pooler.get("pooling_type") or modules.method or ("cls" if is_encoder else "last"),
        num_dimensions=width,
        dense=modules.dense,
        normalizes=pooler.get("normalize", modules.normalizes or is_plain),
        activates=_activates(folder, config, pooler, tasks),
        max_length=modules.max_length,
        dimensions=_dimensions(config),
        num_classes=0 if head == "embed" else num_classes,
        problem_type=config.get("problem_type"),
        class_tokens=class_tokens,
        compares_tokens=compares_tokens,
    )


def describe_results(folder: Path, options: PoolingOptions) -> str:
    """Canonical text of how results are made of hidden states; empty for a model that generates alone.

    Raises as `read_pooling_spec`.
    """
    spec = read_pooling_spec(folder, options)
    if spec is None:
        return ""
    dense = [_read(folder / path / "config.json") for path in spec.dense]
    return json.dumps({**asdict(spec), "dense": dense}, sort_keys=True)


@dataclass(slots=True)
class _Modules:
    """What sentence-transformers' modules.json and the folders that it names say."""

    is_stated: bool = False
    method: str = ""
    dense: tuple[str, ...] = ()
    width: int | None = None
    normalizes: bool = False
    max_length: int | None = None
    others: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, folder: Path) -> _Modules:
        path = folder / "modules.json"
        if not path.is_file():
            return cls()
        stated = _read(path, list)
        modules = cls(is_stated=True)
        for module in stated:
            if not isinstance(module, dict):
                raise PoolingFilesError(f"{path}: a module is {module!r}, must be an object")
            modules._add(folder, str(module.get("type", "")).rpartition(".")[2], str(module.get("path", "")))
        if modules.others:
            raise PoolingFilesError(
                f"{path} has modules {', '.join(modules.others)}; known are {', '.join(_MODULES)}"
            )
        return modules

    def _add(self, folder: Path, kind: str, path: str) -> None:
        if ".." in Path(path).parts or Path(path).is_absolute():
            raise PoolingFilesError(f"{folder}/modules.json: path {path!r} is outside the folder")
        if kind == "Transformer":
            names = ("sentence_bert_config.json", "sentence_roberta_config.json")
            files = [folder / path / name for name in names if (folder / path / name).is_file()]
            if path:
                raise PoolingFilesError(
                    f"{folder}/modules.json has its transformer in {path!r}, not beside it"
                )
            limit = _read(files[0]).get("max_seq_length") if files else None
            self.max_length = limit if type(limit) is int and limit > 0 else None
        elif kind == "Pooling":
            self.method = _method_of(folder / path / "config.json")
        elif kind == "Dense":
            config = _read(folder / path / "config.json")
            self.dense += (path,)
            self.width = config.get("out_features")
        elif kind == "Normalize":
            self.normalizes = True
        else:
            self.others.append(kind)


def _method_of(path: Path) -> str:
    config = _read(path)
    named = config.get("pooling_mode")
    if isinstance(named, str) and named in _METHOD_NAMES:
        return _METHOD_NAMES[named]
    chosen = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(chosen) == 1 and chosen[0] in _METHODS:
        return _METHODS[chosen[0]]
    known = ", ".join(_METHODS)
    raise PoolingFilesError(
        f"{path} has {', '.join(chosen) or named or 'no method'}, must have one of {known}"
    )


def _head_of(architecture: str) -> str:
    if architecture.endswith("ForSequenceClassification"):
        return "classify"
    return "token_classify" if architecture.endswith("ForTokenClassification") else "embed"


def _num_classes(config: dict[str, Any]) -> int:
    labels, number = config.get("id2label"), config.get("num_labels")
    if isinstance(labels, dict):
        return len(labels)
    return number if type(number) is int and number > 0 else 2


def _activates(folder: Path, config: dict[str, Any], pooler: dict[str, Any], tasks: tuple[str, ...]) -> bool:
    """Whether classes are probabilities; those of a cross-encoder as in sentence-transformers."""
    if "use_activation" in pooler or "score" not in tasks:
        return bool(pooler.get("use_activation", True))
    stated = config.get("sentence_transformers")
    name = stated.get("activation_fn") if isinstance(stated, dict) else None
    name = name or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    kind = str(name).rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise PoolingFilesError(
            f"{folder}/config.json: the activation of scores is {name!r}, must be one of Sigmoid, Identity"
        )
    return kind == "Sigmoid"


def _class_tokens(folder: Path, config: dict[str, Any]) -> tuple[tuple[str, ...], bool]:
    """The tokens whose logits are classes, and whether those of a pair are compared."""
    tokens, method = config.get("classifier_from_token"), config.get("method")
    if config.get("is_original_qwen3_reranker") is True:
        tokens, method = tokens or ["no", "yes"], method or _OF_A_PAIR
    if tokens is None:
        return (), False
    if not isinstance(tokens, list) or not tokens or not all(isinstance(each, str) for each in tokens):
        raise PoolingFilesError(
            f"{folder}: classifier_from_token is {tokens!r}, must be a list of tokens as texts"
        )
    if method not in (_OF_A_PAIR, _OF_EACH):
        raise PoolingFilesError(
            f"{folder}: method is {method!r} beside classifier_from_token, must be {_OF_A_PAIR} or {_OF_EACH}"
        )
    if method == _OF_A_PAIR and len(tokens) != 2:
        raise PoolingFilesError(
            f"{folder}: classifier_from_token has {len(tokens)} tokens, {_OF_A_PAIR} takes 2"
        )
    return tuple(tokens), method == _OF_A_PAIR


def _dimensions(config: dict[str, Any]) -> tuple[int, ...] | None:
    stated = config.get("matryoshka_dimensions")
    if isinstance(stated, list) and all(type(each) is int and each > 0 for each in stated):
        return tuple(stated)
    return () if config.get("is_matryoshka") is True else None


def _object(text: str | None, option: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """The JSON object of an option. Raises PoolingFilesError for other keys than these."""
    if text is None:
        return {}
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise PoolingFilesError(f"{option} is {text!r}, must be an object of {', '.join(keys)}")
    if strange := sorted(content.keys() - set(keys)):
        raise PoolingFilesError(f"{option} has {strange[0]!r}, it takes {', '.join(keys)}")
    return content


def _pooler_config(text: str | None) -> dict[str, Any]:
    """The keys of --pooler-config. Raises PoolingFilesError for others and for wrong values."""
    content = _object(text, "pooler_config", _POOLER_CONFIG)
    kind = content.get("pooling_type")
    if kind is not None:
        if not isinstance(kind, str) or kind.lower() not in _METHOD_NAMES:
            known = ", ".join(name.upper() for name in ("cls", "last", "mean", "max"))
            raise PoolingFilesError(f"pooler_config: pooling_type is {kind!r}, must be one of {known}")
        content["pooling_type"] = _METHOD_NAMES[kind.lower()]
    for name in ("normalize", "use_activation"):
        if name in content and type(content[name]) is not bool:
            raise PoolingFilesError(f"pooler_config: {name} is {content[name]!r}, must be true or false")
    return content


def _read(path: Path, kind: type[Any] = dict) -> Any:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PoolingFilesError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, kind):
        raise PoolingFilesError(f"{path} is {type(content).__name__}, must be {kind.__name__}")
    return content
