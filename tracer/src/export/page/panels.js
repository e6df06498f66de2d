// Budget bars, the list of requests, and one request's timeline.

const MOST_ROWS = 300;

function drawBudget(box, parts, selection) {
  const { chosen, usual } = selection;
  const most = Math.max(1e-9, ...parts.map((part) => Math.max(part.chosen, part.usual)));
  const head = element('p', 'faint', usual.count > 0
    ? `Thick: the selection (n=${count(chosen.count)}), thin: usual (n=${count(usual.count)})`
    : `n=${count(chosen.count)}`);
  const rows = parts.sort((a, b) => b.chosen - a.chosen).map((part) => {
    const line = element('div', 'part');
    line.title = part.meaning;
    const bars = element('div', 'bars');
    for (const which of usual.count > 0 ? ['chosen', 'usual'] : ['chosen']) {
      const bar = element('div', which);
      bar.style.width = `${100 * part[which] / most}%`;
      bar.style.background = `var(--${part.name})`;
      bars.append(bar);
    }
    const shift = part.chosen - part.usual;
    const figure = usual.count > 0
      ? `${duration(part.chosen)} (${shift < 0 ? '−' : '+'}${duration(Math.abs(shift))})` : duration(part.chosen);
    line.append(element('div', 'name', part.name), bars, element('div', 'figure', figure));
    return line;
  });
  box.replaceChildren(head, ...rows);
}

function drawRequests(data, selection, query, open) {
  const { byRequest } = selection;
  const all = [];
  byRequest.count.forEach((n, request) => { if (n > 0) all.push(request); });
  const found = query ? all.filter((r) => data.requests.id[r].toLowerCase().includes(query)) : all;
  found.sort((a, b) => byRequest.longest[b] - byRequest.longest[a] || a - b);
  const more = found.length > MOST_ROWS ? `; the ${MOST_ROWS} with the longest tokens are shown` : '';
  byId('requests-status').textContent = query
    ? `${count(found.length)} of the selection's ${count(all.length)} requests match “${query}”${more}`
    : `${count(found.length)} requests have selected tokens${more}`;
  byId('requests-head').replaceChildren(
    row(['Request', 'Tenant', 'Selected tokens', 'Their time', 'Longest', 'Received'], 2, 'th'));
  byId('requests').replaceChildren(...found.slice(0, MOST_ROWS).map((request) => {
    const button = element('button', '', data.requests.id[request]);
    button.type = 'button';
    button.dataset.request = String(request);
    button.addEventListener('click', () => open(request));
    return row([button, data.requests.tenant[request], count(byRequest.count[request]),
      duration(byRequest.time[request]), duration(byRequest.longest[request]),
      data.requests.received[request] === null ? '–' : seconds(data.requests.received[request])], 2);
  }));
}

function partsOf(data, token) {
  const parts = [];
  let at = data.delivered[token] - data.latency[token];
  for (let i = data.segmentsFrom[token]; i < data.segmentsFrom[token + 1]; i++) {
    const leaf = data.leaves[data.leaf[i]];
    parts.push({ from: at, length: data.length[i], label: data.labels[leaf.label].name, path: leaf.path });
    at += data.length[i];
  }
  return parts;
}

// A part in words: its name, and where it was blocked.
function partText(data, part) {
  const [, name, ...stack] = part.path.map((i) => data.names[i]);
  return `${name}, ${duration(part.length)}${stack.length ? `, in ${stack.at(-1)}` : ''}`;
}

function drawTimeline(data, request, selection) {
  const [first, end] = [data.tokensFrom[request], data.tokensFrom[request + 1]];
  const { requests } = data;
  byId('timeline').hidden = false;
  byId('timeline-title').textContent = `Request ${requests.id[request]}`;
  byId('timeline-facts').textContent = [
    `#${requests.number[request]}`,
    requests.received[request] === null ? 'its begin was not seen' : `received at ${seconds(requests.received[request])}`,
    `${count(end - first)} tokens`, requests.prompt[request] === null ? '' : `prompt ${count(requests.prompt[request])} tokens`,
    requests.tenant[request] && `tenant ${requests.tenant[request]}`, requests.model[request],
  ].filter(Boolean).join(' · ');
  const tokens = [];
  let longest = 1;
  for (let token = first; token < end; token++) {
    tokens.push({ token, parts: partsOf(data, token) });
    longest = Math.max(longest, data.latency[token]);
  }
  drawLife(data, tokens);
  byId('tokens-head').replaceChildren(row(['Parts in order of time', 'Token', 'At', 'Latency', 'Longest part'], 1, 'th'));
  byId('tokens').replaceChildren(...tokens.slice(0, MOST_ROWS).map(({ token, parts }) => {
    const strip = element('div', 'strip');
    for (const part of parts) {
      const piece = element('span');
      piece.style.width = `${100 * part.length / longest}%`;
      piece.style.background = `var(--${part.label})`;
      piece.title = partText(data, part);
      strip.append(piece);
    }
    const top = parts.reduce((a, b) => (a && a.length >= b.length ? a : b), null);
    const name = data.choice[token] ? `${data.choice[token]}/${data.index[token]}` : String(data.index[token]);
    const line = row([strip, name, seconds(data.delivered[token]),
      data.flags[token] & 3 ? duration(data.latency[token]) : '–', top ? partText(data, top) : '–'], 1);
    if (selection.region && selection.mask[token] === SELECTED) line.classList.add('chosen');
    return line;
  }));
  if (tokens.length > MOST_ROWS) byId('timeline-facts').textContent += ` · the first ${MOST_ROWS} are listed`;
  byId('legend').replaceChildren(...data.labels.filter(({ name }) =>
    tokens.some(({ parts }) => parts.some((part) => part.label === name))).flatMap(({ name, meaning }) => {
    const swatch = element('span', 'swatch');
    swatch.style.background = `var(--${name})`;
    const text = element('span', '', name);
    text.title = meaning;
    return [swatch, text];
  }));
}

// All tokens of a request on one axis; what is under the pointer is said below.
function drawLife(data, tokens) {
  const canvas = byId('life');
  const { context, width, height } = sized(canvas);
  const from = Math.min(...tokens.map(({ token }) => data.delivered[token] - data.latency[token]));
  const to = Math.max(...tokens.map(({ token }) => data.delivered[token]));
  const x = (us) => width * (us - from) / Math.max(1, to - from);
  const colours = new Map(data.labels.map(({ name }) => [name, colour(name)]));
  const all = tokens.flatMap(({ parts }) => parts);
  for (const part of all) {
    context.fillStyle = colours.get(part.label);
    context.fillRect(x(part.from), 8, Math.max(0.3, x(part.from + part.length) - x(part.from)), height - 16);
  }
  context.fillStyle = colour('ink');
  for (const { token } of tokens) context.fillRect(x(data.delivered[token]) - 0.5, 0, 1, 7);
  const whole = `${seconds(from)} to ${seconds(to)}; ticks are deliveries`;
  byId('life-status').textContent = whole;
  canvas.onpointermove = (event) => {
    const at = from + (to - from) * event.offsetX / width;
    const part = all.find((part) => part.from <= at && at < part.from + part.length);
    byId('life-status').textContent = part ? `${seconds(at)}: ${partText(data, part)}` : whole;
  };
  canvas.onpointerleave = () => { byId('life-status').textContent = whole; };
}
