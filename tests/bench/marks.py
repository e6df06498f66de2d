# marks.py CPU: answers each line "WHAT CALLS" with the CPU time of that many calls, in ns.
import os
import sys
import time
from itertools import repeat

import tracer_marks as marks

SLOTS = [marks.Slot(i, sample_offset=i, generation_step=i) for i in range(32)]


def loop(calls):
    for _ in repeat(None, calls):
        pass


def token(calls):
    mark = marks.token
    for _ in repeat(None, calls):
        mark(7, 0, 5)


def begin(calls):
    mark = marks.request_begin
    for _ in repeat(None, calls):
        mark(7, request_id="req-7", received_ns=5, prompt_tokens=12, tenant_id="acme", model="llama")


def batch(calls):
    for _ in repeat(None, calls):
        if marks.listening():
            marks.batch(1, 0, [marks.Slot(i, sample_offset=i, generation_step=i) for i in range(32)])


def gathered(calls):
    mark = marks.batch
    for _ in repeat(None, calls):
        mark(1, 0, SLOTS)


os.sched_setaffinity(0, {int(sys.argv[1])})
print("ready", flush=True)
for line in sys.stdin:
    what, calls = line.split()
    call = {"loop": loop, "token": token, "begin": begin, "batch": batch, "gathered": gathered}[what]
    begin_ns = time.thread_time_ns()
    call(int(calls))
    print(time.thread_time_ns() - begin_ns, flush=True)
