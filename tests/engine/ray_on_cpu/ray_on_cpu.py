"""vLLM's Ray backends on a machine without a GPU: a platform plugin, active where this folder is on PYTHONPATH.

vLLM's CPU platform has no `ray_device_key`, for which its Ray backends refuse it. This one calls its devices GPUs, of
which `ray start --num-gpus` may promise any number; everything else is vLLM's CPU platform.
"""


def platform() -> str:
    """vLLM asks for the name of the class, since nothing of vLLM's may be imported yet."""
    return "ray_on_cpu_platform.RayOnCpuPlatform"
