// Which tokens are selected, and what their time was spent on. Times are µs since the recording began.

const KINDS = [
  { id: 'itl', flag: 2, name: 'Gaps between tokens' },
  { id: 'ttft', flag: 1, name: 'First tokens' },
];

// Latencies at the shares `at` of the tokens for which `mask` is `wanted`, exactly: by their high, then their low bits.
function quantiles(latency, mask, wanted, count, at) {
  const high = new Uint32Array(65536);
  for (let i = 0; i < latency.length; i++) if (mask[i] === wanted) high[latency[i] >>> 16]++;
  return at.map((share) => {
    let rank = Math.min(count - 1, Math.floor(count * share)), bin = 0;
    while (rank >= high[bin]) rank -= high[bin++];
    const low = new Uint32Array(65536);
    for (let i = 0; i < latency.length; i++)
      if (mask[i] === wanted && latency[i] >>> 16 === bin) low[latency[i] & 65535]++;
    let value = 0;
    while (rank >= low[value]) rank -= low[value++];
    return bin * 65536 + value;
  });
}

// A quantile over the shortest windows of columns that hold enough for it, n·(1 − q) ≥ 10; a rest that is too small has none.
// `from` says where the latencies of each column begin.
function windows(latencies, from, share) {
  const needed = Math.round(10 / (1 - share)), found = [];
  for (let first = 0, column = 1; column < from.length; column++) {
    if (from[column] === from[first]) first = column;
    const count = from[column] - from[first];
    if (count < needed) continue;
    const sorted = latencies.slice(from[first], from[column]).sort();
    found.push({ first, end: column, count, value: sorted[Math.ceil(count * share - 1e-6) - 1] });
    first = column;
  }
  return found;
}

function addTime(data, token, weights) {
  for (let i = data.segmentsFrom[token], end = data.segmentsFrom[token + 1]; i < end; i++)
    weights[data.leaf[i]] += data.length[i];
}

const OTHER_KIND = 0, REST = 1, SELECTED = 2;

// Time by leaf of the selected tokens and of the middle half of the others; the requests that they are of.
function select(data, kind, region) {
  const { latency, delivered, flags, request } = data;
  const mask = new Uint8Array(latency.length);
  const requests = data.requests.id.length;
  const chosen = { count: 0, time: 0, weights: new Float64Array(data.leaves.length) };
  const byRequest = { count: new Uint32Array(requests), time: new Float64Array(requests), longest: new Uint32Array(requests) };
  let rest = 0;
  for (let i = 0; i < latency.length; i++) {
    if ((flags[i] & 3) !== kind.flag) continue;
    const inside = !region || (delivered[i] >= region.from && delivered[i] < region.to
      && latency[i] >= region.low && latency[i] < region.high);
    mask[i] = inside ? SELECTED : REST;
    if (!inside) { rest++; continue; }
    chosen.count++;
    chosen.time += latency[i];
    const r = request[i];
    byRequest.count[r]++;
    byRequest.time[r] += latency[i];
    if (latency[i] >= byRequest.longest[r]) byRequest.longest[r] = latency[i];
    addTime(data, i, chosen.weights);
  }
  const usual = { count: 0, time: 0, weights: new Float64Array(data.leaves.length) };
  if (region && rest > 0) {
    const [low, high] = quantiles(latency, mask, REST, rest, [0.25, 0.75]);
    for (let i = 0; i < latency.length; i++) {
      if (mask[i] !== REST || latency[i] < low || latency[i] > high) continue;
      usual.count++;
      usual.time += latency[i];
      addTime(data, i, usual.weights);
    }
  }
  return { region, chosen, usual, byRequest, mask };
}

// The region of the tokens from a quantile on.
function slowest(data, kind, share) {
  const mask = new Uint8Array(data.latency.length);
  let count = 0;
  for (let i = 0; i < mask.length; i++) if ((data.flags[i] & 3) === kind.flag) { mask[i] = 1; count++; }
  if (count === 0) return null;
  const [low] = quantiles(data.latency, mask, 1, count, [share]);
  return { from: 0, to: Math.ceil(data.span) + 1, low, high: 2 ** 32 };
}

// A tree of frames: time in the selection and, of as many tokens, usually.
function flameTree(data, selection) {
  const { chosen, usual } = selection;
  const scale = usual.count > 0 ? chosen.count / usual.count : 0;
  const root = { name: 'all', value: 0, usual: 0, children: new Map() };
  for (let leaf = 0; leaf < data.leaves.length; leaf++) {
    const value = chosen.weights[leaf], other = usual.weights[leaf] * scale;
    if (value === 0 && other === 0) continue;
    root.value += value;
    root.usual += other;
    let node = root;
    for (const name of data.leaves[leaf].path) {
      let child = node.children.get(name);
      if (!child) node.children.set(name, child = { name: data.names[name], value: 0, usual: 0, children: new Map(), parent: node });
      child.value += value;
      child.usual += other;
      node = child;
    }
  }
  return root;
}

// Mean µs of each part: in the selection, and usually.
function budget(data, selection) {
  const parts = data.labels.map((label) => ({ ...label, chosen: 0, usual: 0 }));
  data.leaves.forEach((leaf, i) => {
    parts[leaf.label].chosen += selection.chosen.weights[i] / Math.max(1, selection.chosen.count);
    parts[leaf.label].usual += selection.usual.weights[i] / Math.max(1, selection.usual.count);
  });
  return parts.filter((part) => part.chosen > 0 || part.usual > 0);
}
