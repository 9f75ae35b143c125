"""A bar of ``tqdm.notebook`` is one of text where no kernel can show its widget."""

from __future__ import annotations

import io
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from elasticlib.workers.child.cells import _text_bars


class TextBar:
    """As that of ``tqdm.std``, as far as it is asked here."""

    def __init__(self, iterable: Any, *, file: Any, ncols: int | None = None, colour: str | None = None) -> None:
        self.iterable, self.file, self.colour = iterable, file, colour

    def __iter__(self) -> Any:
        for each in self.iterable:
            self.display()
            yield each

    def display(self) -> None:
        self.file.write("text ")

    def close(self) -> None:
        self.file.write("closed")


class tqdm_notebook(TextBar):  # noqa: N801 - tqdm's name
    """As tqdm's own: it needs widgets for all that it does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ImportError("IProgress not found")

    def __iter__(self) -> Any:
        raise ImportError("IProgress not found")

    def display(self) -> None:
        raise ImportError("IProgress not found")

    close = display
    colour = property(lambda self: self.container)  # type: ignore[assignment]


def test_the_class_is_that_of_a_text_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = SimpleNamespace(tqdm_notebook=tqdm_notebook)
    monkeypatch.setitem(sys.modules, _text_bars.MODULE, module)
    _text_bars.use_text()
    file = io.StringIO()
    bar = tqdm_notebook(range(2), file=file, display=False, ncols="100%", colour="green")
    items = list(bar)
    bar.close()

    assert items == [0, 1]
    assert file.getvalue() == "text text closed"
    assert bar.colour == "green"


def test_a_module_without_that_class_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, _text_bars.MODULE, ModuleType(_text_bars.MODULE))

    _text_bars.use_text()
