"""Formulas as text, written by hand beside what LaTeX makes of them."""

from __future__ import annotations

import pytest

from lightning_pfl.cli.formulas import plain


@pytest.mark.parametrize(
    ("formula", "said"),
    [
        (r"\lambda > 0", "lambda > 0"),
        (r"\lfloor \gamma \min(d_i, d_j) \rfloor", "floor(gamma min(d_i, d_j))"),
        (r"\frac\rho2 \lVert w \rVert^2", "rho/2 || w ||^2"),
        (r"\frac{\mu}{2}\lVert y\rVert^2", "mu/2 || y||^2"),
        (r"\frac{x - y}{K\eta}", "(x - y)/(K eta)"),
        (r"\tfrac{f(x) - f(y)}{2\delta}", "(f(x) - f(y))/(2 delta)"),
        (r"\frac{\sigma_w^2}{\sigma_k^2}", "sigma_w^2/sigma_k^2"),
        (r"\tau_i = s / \deg(i), \quad k", "tau_i = s / deg(i), k"),
        (r"a_{ij}", "a_ij"),
        (r"f_{\theta_k}(x)", "f_(theta_k)(x)"),
        (r"x^{t+1} = \sum_{k \in S_t} p_k\, y_k", "x^(t+1) = sum_(k in S_t) p_k y_k"),
        (r"(1 - 1/m)^2\, 11^\top", "(1 - 1/m)^2 11^T"),
        (r"\bar\omega_k \le \varepsilon", "bar omega_k <= epsilon"),
        (r"\operatorname{clip}_{[-1, 1]}\frac{r}{2}", "clip_([-1, 1]) r/2"),
        (r"\sqrt{2 \eta / N_k}\; \xi \sim N(0, I)", "sqrt(2 eta / N_k) xi ~ N(0, I)"),
        (r"F_k(h_k, \cdot), (w_1, \dots, w_n)", "F_k(h_k, .), (w_1, ..., w_n)"),
        (r"\Bigl(\langle \nabla F_k(x), y \rangle\Bigr)", "(< grad F_k(x), y >)"),
        (r"\min_x \{f(x)\} \;\text{in a step}\; t", "min_x {f(x)} in a step t"),
    ],
)
def test_formulas_as_text(formula: str, said: str) -> None:
    assert plain(f"From :math:`{formula}` on.") == f"From {said} on."


def test_a_block_has_a_line_for_each_formula() -> None:
    text = r"""With

.. math::
    y &\leftarrow y - \eta\,(g - c), \quad
    \text{from } y = x \\
    x &\leftarrow \frac1n \sum_k y_k, \qquad c \leftarrow 0

and

- a list."""
    assert plain(text) == (
        "With\n\n"
        "    y <- y - eta (g - c), from y = x\n"
        "    x <- 1/n sum_k y_k,\n"
        "    c <- 0\n\n"
        "and\n\n- a list."
    )


def test_a_line_that_ends_in_a_formula_stays_two_lines() -> None:
    assert plain(":math:`\\mu = \n    \\nu` is") == "mu =\n    nu is"


@pytest.mark.parametrize(
    ("link", "said"),
    [(":class:`~a.b.Name`", "Name"), (":meth:`run`", "run"), (":class:`Name`", "Name")],
)
def test_links_are_names(link: str, said: str) -> None:
    assert plain(f"See {link}.") == f"See {said}."
