"""Runs in a sandbox and does not want to end: a child, and a daemon that has forked twice, all deaf to SIGTERM and SIGHUP."""

import os
import signal
import time

for deaf in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(deaf, signal.SIG_IGN)
if os.fork() > 0 and os.fork() == 0:
    os.setsid()
    if os.fork() > 0:
        os._exit(0)
time.sleep(600)
