"""The graph of a model: operators in order of execution, and which of them take what others hand on."""

from planner.models.operators import Operator


class Graph:
    """Operators of one forward.

    Attributes:
        operators: in order of execution, by name.
        sources: of each operator, the names of those whose output it takes.
    """

    def __init__(self) -> None:
        self.operators: dict[str, Operator] = {}
        self.sources: dict[str, tuple[str, ...]] = {}

    def add(self, operator: Operator, *sources: str) -> str:
        """Add an operator that takes the output of earlier ones, and return its name."""
        assert all(source in self.operators for source in sources), "operators are added in order of execution"
        self.operators[operator.name] = operator
        self.sources[operator.name] = sources
        return operator.name
