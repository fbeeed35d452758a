"""A trainer's --worker-extension-cls: methods that the trainer calls on every worker."""


class TrainerExtension:
    def trainer_rank(self) -> int:
        return self.rank

    def break_training(self) -> None:
        """From now on every training of a quality head fails, as it would for want of memory."""

        def train(budget_s: float) -> int:
            raise MemoryError("no memory left")

        self.quality_heads.train = train

    def mend_training(self) -> None:
        del self.quality_heads.train
