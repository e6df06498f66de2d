# The HTTP half of a server as they are split today: it passes requests on to split_engine.py, a socket for each model.
import asyncio
import os

import zmq
import zmq.asyncio
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

app = FastAPI()
queues = {}
sockets = {}


async def receive(socket):
    while True:
        name, text, last = await socket.recv_multipart()
        queues[name].put_nowait((text.decode(), last == b"1"))


@app.on_event("startup")
async def start():
    for model in ("a", "b"):
        sockets[model] = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        sockets[model].bind(os.environ[f"SPLIT_{model.upper()}"])
        asyncio.create_task(receive(sockets[model]))


@app.post("/v1/completions")
async def completions(request: Request):
    body = await request.json()
    name = request.headers["x-request-id"].encode()
    queue = queues[name] = asyncio.Queue()
    await sockets[body["model"]].send_multipart([name, b"%d" % body["max_tokens"]])

    async def events():
        last = False
        while not last:
            text, last = await queue.get()
            yield 'data: {"object":"text_completion","choices":[{"index":0,"text":"%s"}]}\n\n' % text
        yield "data: [DONE]\n\n"
        del queues[name]

    return StreamingResponse(events(), media_type="text/event-stream")
