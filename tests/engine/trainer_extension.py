"""What a trainer puts into --worker-extension-cls: methods that it calls on every worker."""


class TrainerExtension:
    def trainer_rank(self) -> int:
        return self.rank
