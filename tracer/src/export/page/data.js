// The capture: columns of numbers and a table of names, out of the page's data block.
// Block: base64 of gzip of { u32 little-endian: length of the JSON; JSON; the columns that it lists, as LEB128 }.

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

// Numbers of a column: unsigned ones of 32 bits, or `signed`, zigzag, of up to 53.
function varints(bytes, column, at) {
  const out = column.signed ? new Float64Array(column.count) : new Uint32Array(column.count);
  for (let i = 0; i < column.count; i++) {
    let value = 0, scale = 1, byte;
    do {
      byte = bytes[at++];
      value += (byte & 127) * scale;
      scale *= 128;
    } while (byte & 128);
    out[i] = !column.signed ? value : value % 2 ? -(value + 1) / 2 : value / 2;
  }
  return out;
}

async function load() {
  const element = document.getElementById('data');
  const packed = fromBase64(element.textContent.trim());
  element.remove();
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('gzip'));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const jsonLength = new DataView(bytes.buffer).getUint32(0, true);
  const data = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + jsonLength)));
  let at = 4 + jsonLength;
  for (const column of data.columns) {
    data[column.name] = varints(bytes, column, at);
    at += column.bytes;
  }
  unfold(data);
  return data;
}

// Undoes the deltas. Tokens lie by request, and in a request by choice and index.
function unfold(data) {
  const tokens = data.latency.length;
  data.delivered = new Float64Array(tokens);
  data.request = new Uint32Array(tokens);
  data.index = new Uint32Array(tokens);
  data.choice = new Uint32Array(tokens);
  data.segmentsFrom = new Uint32Array(tokens + 1);
  data.tokensFrom = new Uint32Array(data.requests.id.length + 1);
  let token = 0, delivered = 0;
  for (let request = 0; request < data.requests.id.length; request++) {
    data.tokensFrom[request] = token;
    let index = 0, choice = 0;
    for (let n = data.requests.tokens[request]; n > 0; n--, token++) {
      delivered += data.deliveredDelta[token] + data.latency[token];
      index += data.indexDelta[token];
      choice += data.choiceDelta[token];
      data.delivered[token] = delivered;
      data.request[token] = request;
      data.index[token] = index++;
      data.choice[token] = choice;
      data.segmentsFrom[token + 1] = data.segmentsFrom[token] + data.segments[token];
    }
  }
  data.tokensFrom[data.requests.id.length] = token;
}
