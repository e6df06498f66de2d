# As app.py, with the middleware of tracer_marks: the tenant of request "r3-5" is "r3".
import asyncio

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from tracer_marks.fastapi import current, describe, install, token

app = FastAPI()
install(app, model="app")


@app.post("/v1/completions")
async def completions(request: Request):
    tokens = (await request.json())["max_tokens"]
    describe(tenant_id=current().request_id.split("-")[0], prompt_tokens=tokens)

    async def events():
        for number in range(tokens):
            await asyncio.sleep(0.002)
            token()
            yield 'data: {"choices":[{"index":0,"text":"word%d"}]}\n\n' % number
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")
