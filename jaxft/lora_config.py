"""Which projections get an adapter, of which rank and scale: PEFT's options, read as PEFT does.

Source: PEFT 0.21, `LoraConfig`, `check_target_module_exists` and `get_pattern_key`. Paths are those
of transformers' modules, such as `model.layers.0.self_attn.q_proj`.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from jaxft.errors import UserError
from jaxft.model.config import ModelConfig

ALL_LINEAR = "all-linear"
_NAME = re.compile(r"\w+(\.\w+)*")


@dataclass(frozen=True)
class LoraConfig:
    """The adapters' shape, under PEFT's names.

    Attributes:
      r: rank.
      lora_alpha: numerator of the scale.
      lora_dropout: share of the adapter's inputs zeroed in training.
      target_modules: names, each the end of a module's path; or, as one string, a regular
        expression that a whole path must match.
      use_rslora: divide by the root of the rank.
      rank_pattern, alpha_pattern: rank or alpha of the modules whose path ends in a match of the
        key, a name or a regular expression; the first that matches counts.
      layers_to_transform: numbers of the layers that are adapted; None: all.
    """

    r: int
    lora_alpha: float
    lora_dropout: float
    target_modules: tuple[str, ...] | str
    use_rslora: bool
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    layers_to_transform: tuple[int, ...] | None = None

    def rank_of(self, path: str) -> int:
        """Rank of the adapter of a module."""
        return _first_match(self.rank_pattern, path, self.r)

    def scale_of(self, path: str) -> float:
        """Factor on a module's `B @ A`: alpha / r, or alpha / sqrt(r) with rank stabilisation."""
        rank = self.rank_of(path)
        alpha = _first_match(self.alpha_pattern, path, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, path: str) -> bool:
        """Whether the targets, whatever the layers, name this module."""
        if isinstance(self.target_modules, str):
            return re.fullmatch(self.target_modules, path) is not None
        return any(_is_end(name, path) for name in self.target_modules)


def is_pattern(target: str) -> bool:
    """Whether a target is a regular expression and not a module's name."""
    return target != ALL_LINEAR and not _NAME.fullmatch(target)


def check_pattern(pattern: str) -> None:
    """ValueError, with the rest of a sentence, for what is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None


def check_lora_options(
    targets: tuple[str, ...],
    layers: tuple[int, ...] | None,
    ranks: Mapping[str, int],
    alphas: Mapping[str, float],
) -> None:
    """What can be said of the options without a model; `adapted_modules` says the rest.

    Raises:
      UserError: a list that is empty or repeats itself, a regular expression that is none or does
        not stand alone, a rank or alpha out of range.
    """
    lists = {"lora_target_modules": targets}
    if layers is not None:
        lists["layers_to_transform"] = tuple(map(str, layers))
    for name, items in lists.items():
        if not items or len(set(items)) < len(items):
            got = " ".join(items) or "none"
            raise UserError(f"--{name} must name at least one, each once; got {got}")
    for target in targets:
        if len(targets) > 1 and (target == ALL_LINEAR or is_pattern(target)):
            raise UserError(
                f"--lora_target_modules: {target!r} is no name of a module; all-linear and a "
                "regular expression stand alone"
            )
        if re.fullmatch(r"\w+(, ?\w+)+", target):
            raise UserError(
                f"--lora_target_modules {target}: separate the names by spaces, not commas"
            )
    patterns = {"rank_pattern": ranks, "alpha_pattern": alphas}
    expressions = {"lora_target_modules": filter(is_pattern, targets), **patterns}
    for name, keys in expressions.items():
        for key in keys:
            try:
                check_pattern(key)
            except ValueError as error:
                raise UserError(f"--{name}: {error}") from None
    for key, rank in ranks.items():
        if rank < 1:
            raise UserError(f"--rank_pattern: {key}: must be at least 1, got {rank}")
    for key, alpha in alphas.items():
        if alpha <= 0:
            raise UserError(f"--alpha_pattern: {key}: must be above 0, got {alpha:g}")


def read_targets(targets: tuple[str, ...], model: ModelConfig) -> tuple[str, ...] | str:
    """The option --lora_target_modules as `LoraConfig.target_modules` for this model."""
    if targets == (ALL_LINEAR,):
        return own_names(model)
    return targets[0] if is_pattern(targets[0]) else targets


def exact_targets[T: LoraConfig](config: T, model: ModelConfig) -> T:
    """The same adapters, so named that PEFT puts none into the model's other parts.

    A bare q_proj would mean the projections of a vision tower too.
    """
    if not model.left_alone:
        return config
    paths = tuple(adapted_modules(config, model))
    return replace(config, target_modules=paths, layers_to_transform=None)


def own_names(model: ModelConfig) -> tuple[str, ...]:
    """The last parts of the projections' paths: what "all-linear" stands for."""
    return tuple(path.rpartition(".")[2] for path in model.projections)


def adapted_modules(config: LoraConfig, model: ModelConfig) -> dict[str, int]:
    """Path and rank of every projection that gets an adapter, in the model's order.

    Raises:
      UserError: a target or pattern that fits no projection, a target that is none, a layer that
        the model does not have.
    """
    paths = {path: layer for path, (layer, _) in model.module_paths.items()}
    _check_targets(config, model, paths)
    layers = _layers(config, model)
    chosen = [path for path, layer in paths.items() if layer in layers and config.targets(path)]
    if not isinstance(config.target_modules, str):
        for name in config.target_modules:
            if not any(_is_end(name, path) for path in chosen):
                raise UserError(
                    f"--lora_target_modules: {name!r} lies in none of the layers of "
                    f"--layers_to_transform {' '.join(map(str, sorted(layers)))}"
                )
    patterns = {"rank_pattern": config.rank_pattern, "alpha_pattern": config.alpha_pattern}
    for option, pattern in patterns.items():
        for key in pattern:
            if not any(_fits(key, path) for path in chosen):
                raise UserError(f"--{option}: {key!r} fits no module that gets an adapter")
    return {path: config.rank_of(path) for path in chosen}


def count_parameters(config: LoraConfig, model: ModelConfig) -> int:
    """Trained parameters: A `[r, in]` and B `[out, r]` of each adapted projection."""
    paths = model.module_paths
    return sum(rank * sum(paths[path][1]) for path, rank in adapted_modules(config, model).items())


def _check_targets(config: LoraConfig, model: ModelConfig, paths: Mapping[str, int]) -> None:
    known = f"the model has {' '.join(own_names(model))}"
    if isinstance(config.target_modules, str):
        pattern = config.target_modules
        for path in _other_modules(model):
            if config.targets(path):
                raise UserError(
                    f"--lora_target_modules: {pattern!r} matches {path!r} too, which is no "
                    f"projection of a layer and gets no adapter; {known}"
                )
        if not any(map(config.targets, paths)):
            raise UserError(
                f"--lora_target_modules: the regular expression {pattern!r} matches no module; it "
                f"must match a whole path such as {next(iter(paths))!r}; {known}"
            )
        return
    for name in config.target_modules:
        if not any(_is_end(name, path) for path in paths):
            raise UserError(
                f"--lora_target_modules: {name!r} is no projection of this model; {known}"
            )


def _other_modules(model: ModelConfig) -> Iterator[str]:
    """Paths of the modules that are no projections: PEFT refuses a pattern that matches them."""
    prefix = model.module_prefix
    yield from (prefix, f"{prefix}.embed_tokens", f"{prefix}.layers", f"{prefix}.norm", "lm_head")
    yield from (part.rstrip(".") for part in model.left_alone)
    inside = {path.rpartition(".")[0] for path in model.projections}
    inside |= {"input_layernorm", "post_attention_layernorm", "mlp.act_fn"}
    inside |= {"self_attn.q_norm", "self_attn.k_norm"} if model.qk_norm else set()
    post = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
    inside |= post if model.post_norms else set()
    for layer in range(len(model.layers)):
        yield model.layer_path(layer)
        yield from (f"{model.layer_path(layer)}.{name}" for name in sorted(inside))


def _layers(config: LoraConfig, model: ModelConfig) -> set[int]:
    wanted, count = config.layers_to_transform, len(model.layers)
    if wanted is None:
        return set(range(count))
    if isinstance(config.target_modules, str):
        raise UserError(
            "--layers_to_transform cannot be combined with a regular expression in "
            "--lora_target_modules: put the layers into the expression"
        )
    for layer in wanted:
        if not 0 <= layer < count:
            raise UserError(
                f"--layers_to_transform: the model has no layer {layer}, only 0 to {count - 1}"
            )
    return set(wanted)


def _is_end(name: str, path: str) -> bool:
    return f".{path}".endswith(f".{name}")


def _fits(key: str, path: str) -> bool:
    return re.match(rf"(.*\.)?({key})$", path) is not None


def _first_match[T](pattern: Mapping[str, T], path: str, otherwise: T) -> T:
    return next((value for key, value in pattern.items() if _fits(key, path)), otherwise)
