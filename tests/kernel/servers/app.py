# A streaming completion server as they are written with FastAPI: N events with a token, then [DONE].
import asyncio

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

app = FastAPI()


@app.post("/v1/completions")
async def completions(request: Request):
    tokens = (await request.json())["max_tokens"]

    async def events():
        for number in range(tokens):
            await asyncio.sleep(0.002)
            yield 'data: {"object":"text_completion","choices":[{"index":0,"text":" word%d"}]}\n\n' % number
        yield 'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\n' % tokens
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")
