"""What FakeTensorMode needs so that models, autograd and device meshes work inside it as outside."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp import _flat_param
from torch.utils._python_dispatch import _disable_current_modes


def install() -> None:
    """For the rest of this process."""
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment, method-assign]
    fake_tensor.init_gpu_context = lambda device: None
    torch._C._ensureCUDADeviceGuardSet = lambda: None
    torch.nn.Module._apply = _apply  # type: ignore[method-assign]
    _act_as_a_tensor()
    _keep_meshes_real()
    # FSDP1 asks whether memory is there by its address, which a fake tensor has not.
    _flat_param._data_ptr_allocated = lambda tensor: tensor.untyped_storage().size() > 0
    torch.compile = _as_it_is  # type: ignore[assignment]
    _let_packages_take_them_for_real()


def mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def _let_packages_take_them_for_real() -> None:
    """Packages ask whether a tensor is fake, and then leave out what reads values: that is what is looked for."""
    import transformers.utils.import_utils

    transformers.utils.import_utils.is_fake_tensor = lambda x: False


def _as_it_is(model: Any = None, **options: Any) -> Any:
    """``torch.compile`` compiles nothing: it has a fake mode of its own. DeepSpeed's modules decorate with it."""
    return model if model is not None else _as_it_is


def _act_as_a_tensor() -> None:
    """``parameter.data = parameter.data.to(device)``: a fake tensor's device is an attribute of the Python object."""
    data = torch._C.TensorBase.data  # type: ignore[attr-defined]

    def set_data(self: Any, new: torch.Tensor) -> None:
        data.__set__(self, new)
        if isinstance(new, FakeTensor):
            self.fake_device = new.fake_device
            self._rehearsed = getattr(new, "_rehearsed", None)

    # A format of one element reads it; torch does that for its own class alone.
    FakeTensor.__format__ = lambda self, spec: format(self.item() if self.dim() == 0 else repr(self), spec)  # type: ignore[method-assign]
    FakeTensor.data = property(lambda self: data.__get__(self), set_data)  # type: ignore[assignment]


def _apply(self: torch.nn.Module, fn: Callable[..., Any], recurse: bool = True) -> torch.nn.Module:
    """``Module._apply`` for fake tensors: parameters stay the same objects, as they do on a real device."""
    for child in self.children():
        child._apply(fn)
    for name, parameter in self._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            new = fn(parameter)
            if not torch._has_compatible_shallow_copy_type(parameter, new):  # a DTensor without memory gets some
                self._parameters[name] = torch.nn.Parameter(new, parameter.requires_grad)
                continue
            if new is not parameter:
                parameter.data = new
            if parameter.grad is not None:
                parameter.grad.data = fn(parameter.grad)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


def outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with real tensors, whatever mode it is called in."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return called


def _keep_meshes_real() -> None:
    """A device mesh computes ranks from tensors of its own, which must have their values."""
    import torch.distributed as dist
    from torch.distributed import device_mesh
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    mesh = device_mesh.DeviceMesh
    for name in ("__init__", "__getitem__", "_flatten", "_unflatten", "get_coordinate", "get_group"):
        if hasattr(mesh, name):
            setattr(mesh, name, outside(getattr(mesh, name)))
    made = outside(device_mesh.init_device_mesh)
    for module in (device_mesh, dist, _fsdp_init):
        module.init_device_mesh = made  # type: ignore[attr-defined]
