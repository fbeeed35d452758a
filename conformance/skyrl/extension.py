"""A worker extension with the names of SkyRL's: `--worker-extension-cls conformance.skyrl.extension.Extension`.

SkyRL's extension receives weights by CUDA IPC or NCCL. This one reads them from a folder, by the same three calls. So a
machine without a GPU shows that the extension can be named and that calls reach it beside our worker, where it runs.
"""

from __future__ import annotations


class Extension:
    skyrl_is_updating = False

    def skyrl_start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        self.skyrl_is_updating = is_checkpoint_format

    def update_weights_nccl(self, update_info: dict[str, str]) -> None:
        if not self.skyrl_is_updating:
            raise RuntimeError("skyrl_start_weight_update comes first")
        self.reload_weights(weights_path=update_info["folder"])

    def skyrl_finish_weight_update(self) -> None:
        self.skyrl_is_updating = False
