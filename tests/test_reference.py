"""The reference against the numeric cases: `expected` comes from another loop, `hand` from paper."""

import pytest
import torch

import reference
from conftest import CASES, agree, case_arguments, case_results


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_reference_reproduces_the_case(case):
    name, args = case_arguments(case)
    shape = None
    if case.get("feed", {}).get("layout") in ("BTA1", "BTF"):
        args, shape = _agents_as_rows(args)
    outputs = getattr(reference, name)(**args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if shape:
        outputs = [x.reshape(shape[0], shape[2], shape[1]).transpose(1, 2) for x in outputs]
    rtol, atol = (case["rtol"], case["atol"]) if case.get("feed", {}).get("dtype") == "bfloat16" else (1e-7, 1e-7)
    for label, actual, wanted in case_results(case, outputs):
        hand = label.startswith("hand")
        agree(actual, wanted, case["rtol"] if hand else rtol, case["atol"] if hand else atol, label)


def _agents_as_rows(args):
    B, T, A = next(v.shape for v in args.values() if isinstance(v, torch.Tensor) and v.ndim == 3)

    def rows(entry):
        if not isinstance(entry, torch.Tensor):
            return entry
        entry = entry if entry.ndim == 3 else entry[..., None]
        return entry.expand(B, T, A).transpose(1, 2).reshape(B * A, T)

    return {key: rows(value) for key, value in args.items()}, (B, T, A)


def test_the_reference_knows_which_numbers_matter():
    """A NaN in V' at a terminal step, in a masked step or in a later episode stays out of a plain loop's results."""
    nan = torch.nan
    advantage, target = reference.gae(
        0.5,
        1.0,
        torch.tensor([[1.0, 2.0, nan, 4.0, nan]]),
        torch.tensor([[2.0, nan, nan, 2.0, 1.0]]),
        torch.tensor([[1.0, 1.0, nan, 1.0, 1.0]]),
        torch.tensor([[0, 1, 1, 1, 0]]),
        torch.tensor([[0, 1, 1, 0, 0]]),
        mask=torch.tensor([[1, 1, 0, 1, 1]]),
    )
    # step 1: 1 - 2 = -1; step 0: 1 + .5 * 2 - 1 + .5 * -1 = .5; step 3: 1 + .5 * 2 - 4 = -2
    agree(advantage, torch.tensor([[0.5, -1.0, 0.0, -2.0, nan]]), 0, 1e-12)
    agree(target, torch.tensor([[1.5, 1.0, 0.0, 2.0, nan]]), 0, 1e-12)
