"""Errors that end a command with one line and exit code 2."""


class BadInput(Exception):
    """An error that the user can correct: a file, a flag, a model function."""


class BadModel(BadInput):
    """The given model, or what came with it, cannot be used.

    Its text names a command's flags; `of` names a function's arguments.
    """

    def __init__(self, rule: str, runs_with_data: bool = False):
        """rule: what follows the name of the model: "must ..., got ..."."""
        self.rule, self.runs_with_data = rule, runs_with_data
        super().__init__(self.of("--model", "--real"))

    def of(self, model: str, real: str) -> str:
        """The text, with the names by which the user gives the model and asks for real data."""
        remedy = f": run one step on real data instead ({real})" if self.runs_with_data else ""
        return f"{model} {self.rule}{remedy}"
