"""OLMoE, Granite and any Hugging Face MoE, at a given size, through transformers' own classes."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from lightning_sonar.presets import PRESETS

Size = Literal["tiny", "full"]


def build_config(
    name: str,
    size: Size = "tiny",
    *,
    num_layers: int | None = None,
    model_id: str | None = None,
    config: str | None = None,
    trust_remote_code: bool = False,
    **overrides: Any,
) -> Any:
    """The transformers configuration of a model.

    Args:
        name: a name from `PRESETS`, or ``"hf"`` for what ``model_id`` or ``config`` says.
        size: ``"full"`` is the published configuration; ``"tiny"`` has its depth and width reduced.
        num_layers: if given, the number of decoder layers.
        model_id: for ``name="hf"``: a hub id or a local folder with a ``config.json``.
        config: for ``name="hf"``, instead of ``model_id``: an architecture of transformers by its ``model_type``
            (``"mixtral"``), at its default size, or a local ``config.json`` or folder that holds one.
        trust_remote_code: passed to transformers: whether code that lies beside the checkpoint may run.
        overrides: further configuration values.

    Raises:
        ValueError: for an unknown name, size, architecture or value; for a configuration that cannot be read; for
            ``"hf"`` without ``model_id`` and ``config``, or with both.
        OSError: from transformers, if ``model_id`` cannot be reached.
    """
    from transformers import AutoConfig

    if size not in get_args(Size):
        raise ValueError(f"size={size!r}: expected one of {', '.join(get_args(Size))}.")
    if num_layers is not None:
        if num_layers < 1:
            raise ValueError(f"num_layers={num_layers}: expected at least 1.")
        overrides["num_hidden_layers"] = num_layers
    if name == "hf":
        if not (model_id or config):
            raise ValueError(
                "model=hf needs model.id: a hub id such as 'org/name', or a folder with a config.json; or, for random "
                "weights, model.config: an architecture such as 'mixtral', or a config.json."
            )
        if model_id and config:
            raise ValueError(
                f"model.id={model_id} and model.config={config} both say what the model is. Keep model.id for a "
                "checkpoint, model.config for random weights."
            )
        if config:
            return _config_of(config, trust_remote_code, overrides)
        source = str(model_id)
        try:
            found = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        except ValueError as error:
            raise ValueError(f"id={source}: {_refusal(error)}") from error
        _check_overrides(found, overrides)
        return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, **overrides)
    if config is not None:
        raise ValueError(f"model.config={config} is only for model=hf, but the model is {name!r}.")
    if name not in PRESETS:
        raise ValueError(f"model={name!r} is not a model. Choose one of {', '.join(PRESETS)}, hf.")
    preset = PRESETS[name]
    _check_overrides(AutoConfig.for_model(preset.model_type), overrides)
    values = {**preset.full, **(preset.tiny if size == "tiny" else {}), **overrides}
    return AutoConfig.for_model(preset.model_type, **values)


def _config_of(source: str, trust_remote_code: bool, overrides: dict[str, Any]) -> Any:
    """The configuration that ``model.config`` means: a file, a folder or an architecture."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    path = Path(source).expanduser()
    is_path = path.exists() or os.sep in source or path.suffix == ".json"
    file = path / "config.json" if path.is_dir() else path
    if is_path and not file.exists():
        raise ValueError(f"config={source}: there is no file {file}; expected a config.json or a folder with one.")
    if not is_path and source not in CONFIG_MAPPING:
        close = difflib.get_close_matches(source, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, n=3)
        raise ValueError(
            f"config={source} is no architecture that the installed transformers knows, nor a file here. "
            + (f"Did you mean {' or '.join(close)}?" if close else "Expected a model_type such as mixtral, qwen3_moe.")
        )

    def make(**values: Any) -> Any:
        if is_path:
            return AutoConfig.from_pretrained(file, trust_remote_code=trust_remote_code, **values)
        return AutoConfig.for_model(source, **values)

    try:
        base = make()
    except (OSError, ValueError) as error:
        raise ValueError(f"config={source}: no configuration can be made of it: {_refusal(error)}") from error
    if base.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not trust_remote_code:
        text = f"{base.model_type}_text"
        other = f" Take its language model, {text}." if text in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else ""
        raise ValueError(f"config={source}: transformers has no causal language model of this architecture.{other}")
    _check_overrides(base, overrides)
    try:
        return make(**overrides)
    except Exception as error:  # each architecture checks its values with exceptions of its own
        raise ValueError(f"config={source}: transformers refuses these values: {_one_line(error)}") from error


def _refusal(error: Exception) -> str:
    """What transformers says of a configuration, in a line; in our words where it asks for more trust."""
    if "trust_remote_code" not in str(error):
        return _one_line(error)
    return (
        "it brings Python code of its own, which was not run. model.trust_remote_code=true runs it with all your "
        "rights: set it only after reading that code, or take a model that transformers itself has."
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _check_overrides(config: Any, overrides: dict[str, Any]) -> None:
    # transformers takes any keyword and keeps it as an attribute that nothing reads.
    for key in overrides:
        if not has_value(config, key):
            valid = sorted(name for name in vars(config) if not name.startswith("_"))
            close = difflib.get_close_matches(key, valid, n=3)
            raise ValueError(
                f"overrides: {type(config).__name__} has no value {key!r}. "
                + (f"Did you mean {' or '.join(close)}?" if close else f"It has {', '.join(valid)}.")
            )


def has_value(config: Any, key: str) -> bool:
    """Whether a transformers configuration has a value of that name."""
    try:
        return hasattr(config, key)
    except Exception:  # a value that differs from layer to layer refuses to be read at once
        return True


def takes_backend(config: Any) -> bool:
    """Whether transformers lets one choose the expert kernel of this configuration's model.

    Llama 4, JetMoe, DBRX and LongCat-Flash run expert code of their own.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return found is None or found._can_set_experts_implementation()


def build(
    name: str,
    size: Size = "tiny",
    *,
    num_layers: int | None = None,
    pretrained: bool = False,
    model_id: str | None = None,
    config: str | None = None,
    backend: str = "grouped_mm",
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    low_memory: bool = True,
    attn_implementation: str | None = None,
    checkpointing: bool = False,
    trust_remote_code: bool = False,
    **overrides: Any,
) -> nn.Module:
    """Build a causal language model with batched experts, ready to train.

    Args:
        name: a name from `PRESETS`, or ``"hf"`` with ``model_id`` or ``config``.
        size: ``"tiny"`` or ``"full"``; ``"hf"`` models have only their own size.
        num_layers: if given, the number of decoder layers.
        pretrained: load the checkpoint's weights; otherwise they are random.
        model_id: for ``"hf"``: a hub id or a local folder.
        config: for ``"hf"``: an architecture or a local ``config.json``, for random weights; see `build_config`.
        backend: a name in transformers' experts dispatch; see `resolve_backend`. A model that runs expert code of its
            own (`takes_backend`) knows ``"eager"`` only.
        dtype: of the parameters.
        device: where random parameters are made, so that no copy exists elsewhere.
        low_memory: load a checkpoint's tensors straight to ``device`` one by one, never all of them on the CPU.
        attn_implementation: transformers' attention implementation; ``None`` is its own choice.
        checkpointing: activation checkpointing of the decoder layers, non-reentrant.
        trust_remote_code: whether code that lies beside the checkpoint may run.
        overrides: further configuration values.

    Returns:
        The module, in training mode. It keeps no key-value cache.

    Raises:
        ValueError: see `build_config`; also if weights are asked for where there are none, or a backend of a model
            that has no choice.
        OSError: from transformers, if a checkpoint cannot be reached.
    """
    from transformers import AutoModelForCausalLM

    import lightning_sonar.backends  # noqa: F401  transformers must know the names of our backends

    made = build_config(
        name,
        size,
        num_layers=num_layers,
        model_id=model_id,
        config=config,
        trust_remote_code=trust_remote_code,
        **overrides,
    )
    made.use_cache = False
    common: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    if takes_backend(made):
        common["experts_implementation"] = backend
    elif backend != "eager":
        raise ValueError(
            f"backend={backend}: models of type {made.model_type} run expert code of their own, and transformers has "
            "no other for them. Use backend=eager."
        )
    if attn_implementation is not None:
        common["attn_implementation"] = attn_implementation
    if pretrained:
        if config is not None:
            raise ValueError(
                f"pretrained=True needs a checkpoint, and config={config} has none. Use model.id, or pretrained=False."
            )
        if name != "hf" and size == "tiny":
            raise ValueError("pretrained=True needs size='full': no checkpoint of the tiny size exists.")
        source = PRESETS[name].hub_id if model_id is None else model_id
        if low_memory and torch.device(device).type != "cpu":
            common["device_map"] = {"": torch.device(device)}
        model = AutoModelForCausalLM.from_pretrained(source, config=made, **common)
    else:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(made, **common)
    if checkpointing:
        # The reentrant kind runs a layer's backward as a backward of its own, and drops the router's auxiliary loss.
        options = {"use_reentrant": False}
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        else:  # transformers before the renaming
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return model.train()


def count_parameters(config: Any, trust_remote_code: bool = False, experts: str = "auto") -> tuple[int, int]:
    """Numbers of parameters (all, experts) that a configuration gives, without allocating any.

    Args:
        config: a transformers configuration.
        trust_remote_code: whether code that lies beside the checkpoint may run.
        experts: as in `find_expert_tensors`.

    Raises:
        ValueError: if the model has no batched expert tensors, or the configuration makes no model.
    """
    from transformers import AutoModelForCausalLM

    from lightning_sonar.experts import find_expert_tensors

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:
        # Some architectures have no default for a value that the model needs, and say so only in Python's words.
        raise ValueError(
            f"transformers cannot make a {config.model_type} model of this configuration "
            f"({type(error).__name__}: {_one_line(error)}). Set the values that it lacks in model.overrides."
        ) from error
    found = find_expert_tensors(model, experts)
    return found.total_numel, found.numel
