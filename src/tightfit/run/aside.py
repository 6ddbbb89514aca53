"""Work on pretend cards, kept away from a process that has a real one.

torch takes a device that is written in Python for the process's accelerator as soon as it is registered
(`at::getAccelerator` in aten/src/ATen/DeviceAccelerator.cpp, torch 2.11 to 2.13) and asks it for page-locked memory,
which it does not have. So where there is another accelerator, such work is done in a process of its own.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from tightfit.errors import RunError
from tightfit.pretend.operations import NAME

__all__ = ["aside"]

Given = ParamSpec("Given")
Answer = TypeVar("Answer")
CHILD = """
import os, pickle, sys
out = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # what libraries print is no answer
sys.path[:] = pickle.load(sys.stdin.buffer)
work, args, kwargs = pickle.load(sys.stdin.buffer)
try:
    answer = (work(*args, **kwargs), None)
except Exception as error:
    answer = (None, error)
pickle.dump(answer, out)
out.close()
"""


def aside(work: Callable[Given, Answer], *args: Given.args, **kwargs: Given.kwargs) -> Answer:
    """`work(*args, **kwargs)`, in a process of its own where this one has another accelerator.

    What `work` raises is raised here. RunError where something cannot be handed over, or the process dies.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type == NAME:
        return work(*args, **kwargs)
    try:
        question = pickle.dumps(sys.path) + pickle.dumps((work, args, kwargs))
    except Exception as error:  # of pickle, or of whatever object refuses
        raise RunError(
            f"this cannot be measured beside {accelerator}: {error}", accelerator=str(accelerator)
        ) from error
    done = subprocess.run([sys.executable, "-c", CHILD], input=question, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise RunError(f"the process that measures ended with {done.returncode}", returncode=done.returncode)
    answer: tuple[Answer, None] | tuple[None, Exception] = pickle.loads(done.stdout)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]
