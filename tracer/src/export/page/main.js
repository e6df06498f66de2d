// State, its place in the URL, and what follows from it.

const state = { kind: KINDS[0], region: null, query: '', request: null, mode: 'time', theme: null };

function toHash() {
  const hash = new URLSearchParams({ kind: state.kind.id });
  const { region } = state;
  if (region) {
    hash.set('time', `${region.from}-${region.to}`);
    hash.set('latency', `${region.low}-${region.high}`);
  }
  if (state.mode !== 'time') hash.set('mode', state.mode);
  if (state.query) hash.set('search', state.query);
  if (state.request !== null) hash.set('request', state.request);
  if (state.theme) hash.set('theme', state.theme);
  return `#${hash}`;
}

function fromHash(data) {
  const hash = new URLSearchParams(location.hash.slice(1));
  const range = (name) => /^(\d{1,15})-(\d{1,15})$/.exec(hash.get(name) ?? '')?.slice(1).map(Number);
  const [time, latency] = [range('time'), range('latency')];
  state.kind = KINDS.find(({ id }) => id === hash.get('kind')) ?? KINDS[0];
  state.region = time && latency && { from: time[0], to: time[1], low: latency[0], high: latency[1] } || null;
  state.mode = hash.get('mode') === 'difference' ? 'difference' : 'time';
  state.query = hash.get('search') ?? '';
  const request = Number(hash.get('request') ?? NaN);
  state.request = Number.isInteger(request) && request in data.requests.id ? request : null;
  state.theme = ['dark', 'light'].find((theme) => theme === hash.get('theme')) ?? null;
}

function facts(data) {
  document.title = `tracer: ${data.title}`;
  byId('facts').textContent = data.facts.join(' · ');
  byId('notes').textContent = data.notes.join(' · ');
}

load().then((data) => {
  const heatmap = new Heatmap(byId('heatmap'), byId('heat-legend'), byId('heat-cell'), data, (region) => change({ region }));
  const flame = new Flame(byId('flame'), byId('flame-status'));
  const showKind = choices(byId('kinds'), KINDS,
    (id) => change({ kind: KINDS.find((kind) => kind.id === id), region: null }));
  const showMode = choices(byId('modes'),
    [{ id: 'time', name: 'Parts' }, { id: 'difference', name: 'Against usual' }], (mode) => change({ mode }));
  const system = matchMedia('(prefers-color-scheme: dark)');
  const theme = () => state.theme ?? (system.matches ? 'dark' : 'light');
  let selection, shownKind;

  function change(what) {
    Object.assign(state, what);
    history.replaceState(null, '', toHash());
    show(what);
    if (what.request !== undefined && state.request !== null) byId('timeline').scrollIntoView({ block: 'nearest' });
  }

  // Draws what depends on the parts of the state that changed.
  function show(what) {
    const began = performance.now();
    const has = (...names) => names.some((name) => name in what);
    if (has('theme')) {
      document.documentElement.dataset.theme = theme();
      byId('theme').textContent = theme() === 'dark' ? 'Light' : 'Dark';
    }
    if (has('kind') && shownKind !== state.kind) { heatmap.show(state.kind); shownKind = state.kind; }
    const query = state.query.toLowerCase();
    if (has('kind', 'region')) selection = select(data, state.kind, state.region);
    heatmap.region = state.region;
    if (has('kind', 'region', 'theme')) heatmap.draw();
    showKind(state.kind.id);
    showMode(state.mode);
    Object.assign(flame, { query, mode: state.mode });
    if (has('kind', 'region')) {
      flame.show(flameTree(data, selection), selection.chosen.count, selection.usual.count > 0);
      drawBudget(byId('budget'), budget(data, selection), selection);
    } else if (has('query', 'mode')) flame.draw();
    if (has('kind', 'region', 'query')) drawRequests(data, selection, query, (request) => change({ request }));
    if (state.request === null) byId('timeline').hidden = true;
    else if (has('kind', 'region', 'request', 'theme')) drawTimeline(data, state.request, selection);
    if (has('kind', 'region')) say(performance.now() - began);
  }

  function say(took) {
    const { chosen, usual, region } = selection;
    const mean = (group) => duration(group.time / Math.max(1, group.count));
    const status = byId('status');
    status.textContent = !region ? `All ${count(chosen.count)} tokens, mean ${mean(chosen)}`
      : `${count(chosen.count)} tokens selected: ${seconds(region.from)} to ${seconds(Math.min(region.to, data.span))}, `
        + `${duration(region.low)} ${region.high < 2 ** 32 ? `to ${duration(region.high)}` : 'or more'}; mean ${mean(chosen)}`
        + (usual.count ? `, usually ${mean(usual)}` : '');
    status.dataset.tookMs = took.toFixed(1);
  }

  const everything = { kind: 0, region: 0, query: 0, request: 0, mode: 0, theme: 0 };
  function read() {
    fromHash(data);
    byId('search').value = state.query;
    shownKind = undefined;
    show(everything);
  }

  byId('search').addEventListener('input', (event) => change({ query: event.target.value }));
  byId('theme').addEventListener('click', () => change({ theme: theme() === 'dark' ? 'light' : 'dark' }));
  byId('slowest').addEventListener('click', () => change({ region: slowest(data, state.kind, 0.99) }));
  byId('clear').addEventListener('click', () => change({ region: null }));
  byId('timeline-close').addEventListener('click', () => change({ request: null }));
  addEventListener('hashchange', read);
  addEventListener('resize', () => show({ theme: 0 }));
  system.addEventListener('change', () => show({ theme: 0 }));
  facts(data);
  read();
  document.documentElement.dataset.ready = 'true';
}).catch((error) => {
  byId('status').textContent = `This page cannot be shown: ${error.message}`;
  throw error;
});
