"""Errors about memory end a command in one line, with what was asked for and what to change."""

import pytest
import torch

from ranker.cli.complaints import memory_in_one_line
from ranker.cli.entry import user_errors

ON_A_GPU = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.72 GiB of which 3.00 MiB is "
    "free. Process 7 has 80.00 GiB memory in use. Of the allocated memory 1.00 GiB is allocated by PyTorch"
)


def test_no_room_on_a_cpu_is_one_line_without_a_traceback(capsys):
    with pytest.raises(SystemExit) as end, user_errors():
        torch.empty(2**58)
    printed = capsys.readouterr().err
    assert end.value.code == 1
    assert printed.startswith("error: memory: expected enough memory") and "batch.max_tokens" in printed
    assert printed.count("\n") == 1 and "Traceback" not in printed
    assert str(2**60) in printed  # the bytes of 2**58 float32 values


def test_no_room_on_a_gpu_says_how_much_is_free():
    message = memory_in_one_line(torch.OutOfMemoryError(ON_A_GPU))
    assert message.startswith("GPU memory: ") and "of which 3.00 MiB is free" in message and "Process 7" not in message
    assert memory_in_one_line(RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"))
    assert memory_in_one_line(MemoryError()).startswith(
        "memory: expected enough memory for the computation, got 'MemoryError'"
    )


def test_other_errors_keep_their_traceback():
    assert memory_in_one_line(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    with pytest.raises(RuntimeError), user_errors():
        torch.zeros(2, 3) @ torch.zeros(2, 3)
