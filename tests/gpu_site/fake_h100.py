"""An H100 as far as vLLM asks before it computes: imported first, it makes vLLM configure engines as on one."""

from types import SimpleNamespace

import torch
import vllm.platforms
from vllm.platforms.cuda import CudaPlatformBase
from vllm.platforms.interface import DeviceCapability

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=81_559 << 20,
    multi_processor_count=132,
    L2_cache_size=50 << 20,
)
CAPABILITY = (H100.major, H100.minor)

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_properties = lambda *device: H100
torch.cuda.get_device_capability = lambda *device: CAPABILITY
torch.cuda.get_device_name = lambda *device: H100.name


class FakeH100(CudaPlatformBase):
    """A CUDA platform whose driver queries have the answers of an H100."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(*CAPABILITY)

    @classmethod
    def has_device_capability(cls, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
        wanted = capability if isinstance(capability, tuple) else divmod(capability, 10)
        return tuple(wanted) <= CAPABILITY

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return H100.name

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return H100.total_memory

    @classmethod
    def is_fully_connected(cls, device_ids: list[int]) -> bool:
        return True

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return H100.multi_processor_count

    @classmethod
    def device_count(cls) -> int:
        return 1


vllm.platforms._current_platform = FakeH100()
