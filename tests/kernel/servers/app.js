// The same with Node's own HTTP server.
const http = require('http');

http.createServer((request, response) => {
  let body = '';
  request.on('data', (data) => { body += data; });
  request.on('end', () => {
    const tokens = JSON.parse(body).max_tokens;
    response.writeHead(200, { 'Content-Type': 'text/event-stream' });
    let number = 0;
    const timer = setInterval(() => {
      if (number < tokens) {
        response.write(`data: {"object":"text_completion","choices":[{"index":0,"text":" word${number++}"}]}\n\n`);
        return;
      }
      clearInterval(timer);
      response.end('data: [DONE]\n\n');
    }, 2);
  });
}).listen(Number(process.argv[2]), '127.0.0.1');
