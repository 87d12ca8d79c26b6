"""Executes the PTX that Triton emits for sm_80 on a CPU: tests run the compiled kernels without a GPU.

::

    launch        takes the place of Triton's launch: compiles, then runs all CTAs
    program       parses PTX into basic blocks
    machine       executes a CTA: registers, warps, branches, barriers, asynchronous copies
    arithmetic    instructions on each thread's own registers
    fragments     matrix instructions of a warp
    memory        global and shared memory with their checks, and the race detector
    mutations     faults for the tests of the checks

What it does not show: faults of ``ptxas``, the rounding of tensor cores, speed, and memory ordering finer
than barriers. Code for sm_90 is another program.
"""
