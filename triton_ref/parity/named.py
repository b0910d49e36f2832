"""Running a JAX function while looking at the values that `checkpoint_name` gives names to."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import Literal


def run_named(
    function: Callable, taps: Mapping[str, jax.Array], *args: Any
) -> tuple[Any, dict[str, jax.Array]]:
    """`function(*args)`, and its named values; a tap is added to the value of its name.

    The gradient with respect to a tap of zeros is the gradient at that value. Names inside inner
    functions (of jit, scan, custom derivatives) are not seen.
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    jaxpr, named = closed.jaxpr, {}
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    known |= zip(jaxpr.invars, jax.tree.leaves(args), strict=True)

    def value(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else known[variable]

    for equation in jaxpr.eqns:
        parameters = equation.primitive.get_bind_params(equation.params)
        results = equation.primitive.bind(*map(value, equation.invars), **parameters)
        if not equation.primitive.multiple_results:
            results = [results]
        if equation.primitive.name == "name":
            name = equation.params["name"]
            results = [results[0] + taps[name] if name in taps else results[0]]
            named[name] = results[0]
        known |= zip(equation.outvars, results, strict=True)
    return jax.tree.unflatten(jax.tree.structure(shape), map(value, jaxpr.outvars)), named
