"""How a key is made from the arguments of a task: by names, by a template, or by a function."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from string import Formatter
from typing import TYPE_CHECKING, Any, Final

from celery_singleflight.canonical import canonical, plain
from celery_singleflight.discretion import told
from celery_singleflight.errors import LockKeyError, OptionError
from celery_singleflight.spelling import nearest

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("Arguments", "compile_scope")

_FIELD: Final = re.compile(r"^([A-Za-z_]\w*)((?:\.[A-Za-z]\w*|\[\w+\])*)$")
_STEP: Final = re.compile(r"\.(\w+)|\[(\w+)\]")


class Arguments:
    """The signature of a task's own function, `self` apart."""

    def __init__(self, signature: inspect.Signature) -> None:
        self._signature = signature
        kinds = [parameter.kind for parameter in signature.parameters.values()]
        self.is_open = inspect.Parameter.VAR_KEYWORD in kinds
        self.parameters = tuple(signature.parameters)
        self._keywords = next(
            (name for name, p in signature.parameters.items() if p.kind is inspect.Parameter.VAR_KEYWORD), None
        )
        self.names = tuple(name for name in signature.parameters if name != self._keywords)
        self._known = frozenset(self.names)
        is_plain = all(kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds)
        empty = inspect.Parameter.empty
        #: What each argument is when it is not given, of a function that has nothing but plain parameters; else None.
        self._defaults = (
            {name: p.default for name, p in signature.parameters.items() if p.default is not empty} if is_plain else None
        )

    def bind(self, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by name, defaults applied. A pydantic model is taken as the dict that Celery sends for it.

        Raises `TypeError` as the call itself would.
        """
        arguments = self._bind_plainly(args, kwargs)
        if arguments is None:
            bound = self._signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = bound.arguments
        if self._keywords:
            # Under their own names for a recipe that asks for one, and under the parameter's for the arguments as a whole.
            arguments = {**arguments[self._keywords], **arguments}
        for name, value in arguments.items():
            if hasattr(value, "model_dump"):
                arguments[name] = value.model_dump(mode="json")
        return arguments

    def _bind_plainly(self, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the arguments by name, or None where it takes more than putting names to them."""
        if self._defaults is None or len(args) + len(kwargs) > len(self.names):
            return None
        if len(args) == len(self.names):
            return dict(zip(self.names, args, strict=True))
        positional = dict(zip(self.names, args, strict=False))
        arguments = {**self._defaults, **positional, **kwargs}
        return arguments if arguments.keys() == self._known and positional.keys().isdisjoint(kwargs) else None

    def as_keywords(self, arguments: Any) -> dict[str, Any]:
        """Return keyword arguments for a call with these arguments by name, such as `bind` returns. Raises `TypeError`."""
        if not isinstance(arguments, Mapping):
            raise TypeError(f"expected a mapping of arguments by name, got {type(arguments).__name__}")
        return {name: value for name, value in arguments.items() if name != self._keywords}

    def require(self, option: str, names: Any) -> None:
        """Raise `OptionError` unless each of these names is an argument of the task."""
        for name in names:
            if name not in self.names and not self.is_open:
                meant = nearest(name, self.names)
                raise OptionError(
                    f"{option}: there is no argument {name}"
                    + (f", did you mean {meant}?" if meant else ".")
                    + (f" Expected one of {', '.join(self.names)}" if self.names else " The task has no arguments")
                )


def compile_scope(option: str, recipe: Any, arguments: Arguments) -> Callable[[Mapping[str, Any]], list[Any]]:
    """Return the function that makes the parts of a key from the bound arguments; `recipe` None takes all of them.

    Raises `OptionError` when the recipe names what the task does not have.
    """
    if recipe is None:
        return lambda bound: [bound[name] for name in arguments.parameters]
    if isinstance(recipe, str):
        return _template(option, recipe, arguments)
    if callable(recipe):
        return _function(option, recipe, arguments)
    arguments.require(option, recipe)
    return lambda bound: [_pick(option, bound, name) for name in recipe]


def _pick(option: str, bound: Mapping[str, Any], name: str) -> Any:
    try:
        return bound[name]
    except KeyError:
        raise LockKeyError(f"{option}: the call has no argument {name}") from None


def _template(option: str, template: str, arguments: Arguments) -> Callable[[Mapping[str, Any]], list[Any]]:
    parts: list[tuple[str, str, list[str], str]] = []
    try:
        pieces = list(Formatter().parse(template))
    except ValueError as error:
        raise OptionError(f"{option}: {template!r} is no template: {error}") from error
    for literal, field, spec, conversion in pieces:
        if field is None:
            parts.append((literal, "", [], ""))
            continue
        match = _FIELD.match(field)
        if match is None or conversion or "{" in (spec or ""):
            raise OptionError(
                f"{option}: {template!r} has the field {_as_written(field, spec, conversion)}, expected an argument name with "
                "public attributes, items and a format, such as {account.id}, {order[id]} or {day:%Y-%m}"
            )
        arguments.require(option, [match[1]])
        parts.append((literal, match[1], [a or b for a, b in _STEP.findall(match[2])], spec or ""))
    if template in arguments.names:
        raise OptionError(
            f"{option}: {template!r} is a template without a field, so every call would have one key; did you mean "
            f"({template!r},) or '{{{template}}}'?"
        )
    if not any(name for _, name, _, _ in parts):
        raise OptionError(
            f"{option}: {template!r} names no argument, so every call would have one key; expected a field such as "
            "{account.id}" + (", or () for the task as a whole" if option.endswith("lock_on") else "")
        )

    def scope(bound: Mapping[str, Any]) -> list[Any]:
        return [
            "".join(
                literal + (_text(_walk(option, _pick(option, bound, name), steps), spec, option) if name else "")
                for literal, name, steps, spec in parts
            )
        ]

    return scope


def _as_written(field: str, spec: str | None, conversion: str | None) -> str:
    return "{" + field + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "") + "}"


def _walk(option: str, value: Any, steps: list[str]) -> Any:
    for step in steps:
        try:
            if isinstance(value, Mapping):
                value = value[step]
            elif isinstance(value, list | tuple) and step.isdigit():
                value = value[int(step)]
            else:
                value = getattr(value, step)
        except (AttributeError, LookupError) as error:
            raise LockKeyError(f"{option}: {type(value).__name__} has no {step}") from error
    return value


def _text(value: Any, spec: str, option: str) -> str:
    if spec:
        try:
            return format(value, spec)
        except (TypeError, ValueError) as error:
            raise LockKeyError(f"{option}: {type(value).__name__} cannot be formatted as {spec!r}") from error
    form = plain(value)
    return form if isinstance(form, str) else canonical(value)


def _function(option: str, function: Callable[..., Any], arguments: Arguments) -> Callable[[Mapping[str, Any]], list[Any]]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise OptionError(f"{option}: {function!r} does not tell which arguments it takes; wrap it in a lambda") from error
    if inspect.iscoroutinefunction(function):
        raise OptionError(f"{option}: the function is async, so it would return no parts of a key; expected a plain function")
    for parameter in parameters:
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL):
            raise OptionError(
                f"{option}: the function takes {parameter} by position only, expected parameters that have the names of the "
                "task's arguments: it is called with those"
            )
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    named = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    wanted = [p.name for p in named]
    arguments.require(option, [p.name for p in named if p.default is inspect.Parameter.empty])

    def scope(bound: Mapping[str, Any]) -> list[Any]:
        chosen = bound if takes_all else {name: bound[name] for name in wanted if name in bound}
        try:
            parts = function(**chosen)
        except Exception as error:
            raise LockKeyError(f"{option}: the function failed, so the task does not run: {told(error)}") from error
        if parts is None:
            raise LockKeyError(f"{option}: the function returned None, expected the parts of a key")
        return list(parts) if isinstance(parts, list | tuple) else [parts]

    return scope
