"""A trainer's --worker-extension-cls: methods that the trainer calls on every worker."""


class TrainerExtension:
    def trainer_rank(self) -> int:
        return self.rank

    def begin_load(self) -> None:
        """Prepare the model for new weights, as a trainer does that then dies: its layers have no memory."""
        from vllm.model_executor.model_loader.reload.layerwise import initialize_layerwise_reload

        initialize_layerwise_reload(self.model_runner.get_model())

    def break_training(self) -> None:
        """From now on every training of a quality head fails, as it would for want of memory."""

        def train(budget_s: float) -> int:
            raise MemoryError("no memory left")

        self.quality_heads.train = train

    def mend_training(self) -> None:
        del self.quality_heads.train
