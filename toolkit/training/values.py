"""Where the values of a model to export come from, one tensor at a time: the checkpoint, the base model's own files, or
PEFT's merge of a layer. The model itself has no values in memory but those of its adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from toolkit.errors import RunFailed
from toolkit.model.sources import NotByPart, set_values, source_of
from toolkit.training.merge import merge_and_unload, merged_by_peft
from toolkit.training.tensor_folder import TensorReader

Read = Callable[[], torch.Tensor]


class Values:
    """The values of a model without values (``preparation.without_values``) that a checkpoint has trained."""

    def __init__(self, model: nn.Module, names: list[str], reader: TensorReader, suffix: str) -> None:
        """``names``: what the checkpoint has of the model, in ``reader`` with ``suffix`` behind it. Weights with
        memory, an adapter's, get their values here. Raises RunFailed if model and checkpoint have other tensors."""
        self._read: dict[int, tuple[nn.Parameter, Read]] = {}
        self._merged: dict[int, _Layers] = {}
        parameters = dict(model.named_parameters())
        wrong = next(
            (n for n in names if n not in parameters or reader.index[n + suffix].shape != parameters[n].shape), None
        )
        if wrong is not None:
            raise RunFailed(f"{reader.folder}: {wrong}: the model has no tensor of this name and shape")
        trained = set(names)
        missing = sorted(name for name, p in parameters.items() if p.requires_grad and name not in trained)
        if missing:
            raise RunFailed(f"{reader.folder}: {len(missing)} trained tensors are missing, for example {missing[0]}")
        for name, parameter in parameters.items():
            # The dtype that it has now: a frozen weight is rounded to it before an export casts it once more.
            as_trained, source = parameter.dtype, source_of(parameter)
            if name in trained and not parameter.is_meta:
                parameter.data.copy_(reader.get(name + suffix))
            elif name in trained:
                self._know(parameter, partial(_from_checkpoint, reader, name + suffix, as_trained))
            elif source is not None:
                self._know(parameter, partial(_from_base, source, as_trained, parameter.shape))
        self.unknown = [name for name, p in parameters.items() if not p.is_meta and name not in trained]
        """What neither the checkpoint nor a source has: an adapter's frozen weights, as they were drawn."""

    def _know(self, parameter: nn.Parameter, read: Read) -> None:
        self._read[id(parameter)] = parameter, read

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a parameter or buffer of the model, in its dtype. Raises NotByPart if it has none."""
        if id(tensor) in self._merged:
            return self._merged[id(tensor)].take(tensor, self.alone).to(tensor.dtype)
        return self.alone(tensor).to(tensor.dtype)

    def alone(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values before anything is merged."""
        if not tensor.is_meta:
            return tensor.detach()
        if id(tensor) not in self._read:
            raise NotByPart("a tensor of it has no values and no source")
        return self._read[id(tensor)][1]()

    def merge(self, adapted: Any) -> Any:
        """The base model as PEFT's ``merge_and_unload`` leaves it, without values: what it would merge is noted, and
        done when a tensor of that layer is asked for."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        for module in adapted.modules():
            if isinstance(module, BaseTunerLayer):
                module.merge = partial(self._note, module)
        base = merge_and_unload(adapted)
        # PEFT compares addresses, which tensors without values do not have.
        head, table = _weight(base.get_output_embeddings), _weight(base.get_input_embeddings)
        if head is not table and None not in (head, table) and getattr(base.config, "tie_word_embeddings", False):
            base.config.tie_word_embeddings = False
        return base

    def _note(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        del layer.merge  # the class's own again
        own = _Layers([(layer, partial(layer.merge, *args, **kwargs))])
        module = layer.get_base_layer()
        held = {name: p for name, p in module.named_parameters() if p.is_meta}
        if not held:
            raise NotByPart("PEFT merges a layer without weights of its own")
        own.places = {id(parameter): (parameter, module, name) for name, parameter in held.items()}
        # Layers that share a weight, tied ones or several parameters of one module, are merged together.
        groups = {id(group): group for key in own.places if (group := self._merged.get(key)) is not None}
        joined = _Layers()
        for group in (*groups.values(), own):
            joined.merges += group.merges
            joined.places |= {key: place for key, place in group.places.items() if key not in joined.places}
        for key in joined.places:
            self._merged[key] = joined


@dataclass
class _Layers:
    """Layers that are merged together, and the weights that this changes: each with a module that has it and its name
    there."""

    merges: list[tuple[Any, Callable[[], None]]] = field(default_factory=list)
    places: dict[int, tuple[nn.Parameter, nn.Module, str]] = field(default_factory=dict)
    ready: dict[int, torch.Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def take(self, tensor: torch.Tensor, before: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The merged values of one of the weights, each once. They are merged in the wider of the dtypes that the
        weight was trained and is written in, so that they are rounded once."""
        if self.merges:
            dtypes = {key: parameter.dtype for key, (parameter, _, _) in self.places.items()}
            for parameter, _, _ in self.places.values():
                values = before(parameter)
                set_values(parameter, values.to(torch.promote_types(values.dtype, parameter.dtype)))
            for layer, merge in self.merges:
                before_it = layer.get_base_layer()
                merged_by_peft(merge)
                if layer.get_base_layer() is not before_it:
                    raise NotByPart("PEFT merges it by exchanging modules")  # ln-tuning
            self.merges.clear()  # with the layers, which may keep a copy of their weight
            for key, (parameter, module, name) in self.places.items():
                self.ready[key] = module.get_parameter(name).data
                set_values(parameter, torch.empty(parameter.shape, dtype=dtypes[key], device="meta"))
        return self.ready.pop(id(tensor))


def _weight(of: Callable[[], Any]) -> Any:
    try:
        return getattr(of(), "weight", None)
    except (NotImplementedError, AttributeError):
        return None


def _from_checkpoint(reader: TensorReader, name: str, dtype: torch.dtype) -> torch.Tensor:
    return reader.get(name).to(dtype)


def _from_base(source: Any, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    values: torch.Tensor = source.whole().to(dtype).view(shape)
    return values
