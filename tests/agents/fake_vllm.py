"""A process that speaks for a vLLM server, and misbehaves as its first argument says.

python fake_vllm.py MODE SOCKET WEIGHTS
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading

import msgspec

from agents.samplers.vllm_server import Failed, Question, Ready, read_frame, to_frame

_, mode, socket_fd, _ = sys.argv
wire = socket.socket(fileno=int(socket_fd))
decoder = msgspec.msgpack.Decoder(Question)

print(f"fake engine, mode {mode}", file=sys.stderr, flush=True)
if mode == "dead on arrival":
    sys.exit("No module named 'vllm'")
while True:
    try:
        question = decoder.decode(read_frame(wire.recv))
    except EOFError:
        if mode == "stubborn":
            threading.Event().wait()
        sys.exit(0)
    match mode:
        case "dying":
            sys.exit(3)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "cut off":
            wire.sendall(to_frame(Ready())[:-1])
            sys.exit(0)
        case "silent":
            continue
        case "dripping":
            wire.sendall(to_frame(Ready())[:6])
        case "garbage":
            wire.sendall(b"\x00\x00\x00\x05hello")
        case "boundless":
            wire.sendall(b"\xff\xff\xff\xff")
        case "mistaken":
            wire.sendall(to_frame(Ready()))
        case "sorry":
            wire.sendall(to_frame(Failed(reason="ValueError: no room for keys and values")))
        case _:
            wire.sendall(to_frame(Ready()))
