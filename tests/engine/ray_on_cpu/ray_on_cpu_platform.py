"""The platform class that `ray_on_cpu.platform` names."""

from vllm.platforms.cpu import CpuPlatform


class RayOnCpuPlatform(CpuPlatform):
    ray_device_key = "GPU"
