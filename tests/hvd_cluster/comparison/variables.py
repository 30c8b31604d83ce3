"""Variables of models that are alike."""


class Variable:
    """A variable as a framework has it; its path tells it apart from others of one process."""

    shape = (3,)

    def __init__(self, path):
        self.path = path

    def assign(self):
        pass
