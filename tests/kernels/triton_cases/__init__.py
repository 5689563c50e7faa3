"""Every Triton kernel against its reference: one table of cases, run small by the interpreter and large on a GPU.

    TRITON_INTERPRET=1 python -m triton_cases OP,... SEED [each|pairs|all]        (the CPU; without the variable set, a GPU)

The last argument says how many combinations of shapes, dtypes and options run (see `bed.Amount`).

Inputs are fresh random numbers of the seed; memory the kernels get from torch.empty is filled with NaN (or the largest
integer) first, so that what isn't written shows.
"""
