// Time × latency with logarithmic rows. A selection is a block of cells, and exactly the tokens in them.

const COLUMNS = 200, ROWS_PER_DECADE = 12, LEFT = 64, BOTTOM = 20, LOSS_STRIP = 6;
const LINES = [{ name: 'p50', share: 0.5, dash: [] }, { name: 'p99', share: 0.99, dash: [7, 3] }];
// What is known of a kind once it was shown.
const MEASURED = ['columnWidth', 'firstRow', 'edges', 'rows', 'counts', 'most', 'from', 'lines', 'lost'];

class Heatmap {
  constructor(canvas, legend, said, data, onSelect) {
    Object.assign(this, { canvas, legend, said, data, onSelect, region: null, cursor: { column: 0, row: 0 }, anchor: null, known: new Map() });
    canvas.addEventListener('pointerdown', (event) => this.begin(event));
    canvas.addEventListener('pointermove', (event) => {
      if (this.rows === 0) return;
      if (this.dragging) this.extend(this.cell(event)); else this.say(this.cell(event));
    });
    canvas.addEventListener('pointerup', () => this.finish());
    canvas.addEventListener('pointercancel', () => { this.dragging = false; });
    canvas.addEventListener('keydown', (event) => this.key(event));
    canvas.addEventListener('focus', () => this.draw());
    canvas.addEventListener('blur', () => this.draw());
  }

  show(kind) {
    if (!this.known.has(kind)) this.known.set(kind, this.measure(kind));
    Object.assign(this, this.known.get(kind), { cursor: { column: 0, row: 0 }, anchor: null });
    this.explain();
  }

  // What is drawn of a kind of tokens.
  measure(kind) {
    const { latency, delivered, flags, span } = this.data;
    this.columnWidth = Math.max(1, Math.ceil(span / COLUMNS));
    let least = Infinity, most = 0;
    for (let i = 0; i < latency.length; i++) {
      if ((flags[i] & 3) !== kind.flag) continue;
      if (latency[i] < least) least = latency[i];
      if (latency[i] > most) most = latency[i];
    }
    this.firstRow = Math.floor(Math.log10(Math.max(1, Math.min(least, most))) * ROWS_PER_DECADE);
    // Edges are whole µs, and so the same in the URL.
    this.edges = [least === Infinity ? 1 : 0];
    while (this.edges.at(-1) <= most) {
      this.edges.push(Math.max(this.edges.at(-1) + 1,
        Math.round(10 ** ((this.firstRow + this.edges.length) / ROWS_PER_DECADE))));
    }
    this.rows = this.edges.length - 1;
    this.counts = new Uint32Array(COLUMNS * Math.max(1, this.rows));
    for (let i = 0; i < latency.length; i++) {
      if ((flags[i] & 3) !== kind.flag) continue;
      this.counts[this.rowOf(latency[i]) * COLUMNS + this.columnOf(delivered[i])]++;
    }
    this.most = this.counts.reduce((a, b) => Math.max(a, b), 0);
    this.quantileLines(kind);
    this.lost = Array.from({ length: COLUMNS }, (_, column) => this.data.losses.filter(({ from, to }) =>
      from < (column + 1) * this.columnWidth && to > column * this.columnWidth));
    return Object.fromEntries(MEASURED.map((name) => [name, this[name]]));
  }

  // Lines of quantiles, from the latencies by column.
  quantileLines(kind) {
    const { latency, delivered, flags } = this.data;
    const from = this.from = new Uint32Array(COLUMNS + 1);
    for (let i = 0; i < latency.length; i++)
      if ((flags[i] & 3) === kind.flag) from[this.columnOf(delivered[i]) + 1]++;
    for (let column = 0; column < COLUMNS; column++) from[column + 1] += from[column];
    const latencies = new Uint32Array(from[COLUMNS]), next = from.slice();
    for (let i = 0; i < latency.length; i++)
      if ((flags[i] & 3) === kind.flag) latencies[next[this.columnOf(delivered[i])]++] = latency[i];
    this.lines = LINES.map((line) => ({ ...line, windows: windows(latencies, from, line.share) }));
  }

  isEmpty(column) { return this.from[column] === this.from[column + 1]; }

  // What is drawn besides cells.
  explain() {
    const key = (className, text, title = '') => {
      const swatch = element('span', `key ${className}`), words = element('span', '', text);
      words.title = title;
      return [swatch, words];
    };
    const lines = this.lines.flatMap(({ name, share, windows }) => {
      const needed = count(10 / (1 - share));
      return key(name, windows.length > 0 ? `${name}, n ≥ ${needed} each` : `${name} – (n < ${needed})`);
    });
    const columns = [...Array(COLUMNS).keys()].filter((column) => column * this.columnWidth < this.data.span);
    const empty = columns.some((column) => this.isEmpty(column)) ? key('empty', 'no tokens') : [];
    const what = this.data.losses.map((loss) => `${this.times(loss)}: ${loss.what}`).join('\n');
    const lost = this.data.losses.length > 0 ? key('lost', 'events lost', what) : [];
    this.legend.replaceChildren(...lines, ...empty, ...lost);
  }

  times({ from, to }) { return `${seconds(from)} to ${seconds(to)}`; }

  // What is at a cell, in words.
  say({ column, row }) {
    const from = column * this.columnWidth, n = this.counts[row * COLUMNS + column];
    const at = [`${this.times({ from, to: from + this.columnWidth })}, ${duration(this.edges[row])} to ${duration(this.edges[row + 1])}: `
      + (this.isEmpty(column) ? 'no tokens' : `${count(n)} tokens`)];
    for (const { name, windows } of this.lines) {
      const window = windows.find(({ first, end }) => first <= column && column < end);
      if (window && !this.isEmpty(column)) at.push(`${name} ${duration(window.value)} of ${count(window.count)}`);
    }
    at.push(...this.lost[column].map(({ what }) => `events lost: ${what}`));
    this.said.textContent = at.join(' · ');
  }

  columnOf(us) { return Math.min(COLUMNS - 1, Math.max(0, Math.floor(us / this.columnWidth))); }

  rowOf(us) {
    let low = 0, high = this.rows - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.edges[middle] <= us) low = middle; else high = middle - 1;
    }
    return Math.max(0, low);
  }

  cell(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - LEFT) / (box.width - LEFT) * COLUMNS);
    const row = this.rows - 1 - Math.floor((event.clientY - box.top) / (box.height - BOTTOM) * this.rows);
    return this.inside({ column, row });
  }

  inside({ column, row }) {
    return { column: Math.min(COLUMNS - 1, Math.max(0, column)), row: Math.min(this.rows - 1, Math.max(0, row)) };
  }

  begin(event) {
    if (this.rows === 0) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.dragging = true;
    this.anchor = this.cell(event);
    this.extend(this.anchor);
  }

  extend(cell) {
    this.cursor = cell;
    this.region = this.block(this.anchor, cell);
    this.draw();
  }

  finish() {
    if (!this.dragging) return;
    this.dragging = false;
    this.onSelect(this.region);
  }

  block(a, b) {
    const [left, right] = [Math.min(a.column, b.column), Math.max(a.column, b.column)];
    const [bottom, top] = [Math.min(a.row, b.row), Math.max(a.row, b.row)];
    return {
      from: left * this.columnWidth, to: (right + 1) * this.columnWidth,
      low: this.edges[bottom], high: this.edges[top + 1],
    };
  }

  key(event) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1],
      Home: [-COLUMNS, 0], End: [COLUMNS, 0], PageUp: [0, 6], PageDown: [0, -6] };
    const move = moves[event.key];
    if (this.rows === 0 || (!move && !['Enter', ' ', 'Escape'].includes(event.key))) return;
    event.preventDefault();
    if (event.key === 'Escape') { this.anchor = null; this.onSelect(null); return; }
    if (move) {
      const before = this.cursor;
      this.cursor = this.inside({ column: before.column + move[0], row: before.row + move[1] });
      this.say(this.cursor);
      if (!event.shiftKey) { this.anchor = null; this.draw(); return; }
      this.anchor ??= before;
    } else {
      this.anchor = this.cursor;
    }
    this.extend(this.cursor);
    this.onSelect(this.region);
  }

  draw() {
    const { context, width, height } = sized(this.canvas);
    const plot = { width: width - LEFT, height: height - BOTTOM };
    const x = (column) => LEFT + plot.width * column / COLUMNS;
    const y = (row) => plot.height * (1 - row / this.rows);
    context.fillStyle = colour('faint');
    if (this.most === 0) { context.fillText('no such tokens with a known latency', LEFT, 40); return; }
    this.columns(context, plot, x);
    const warm = colour('warm');
    for (let row = 0; row < this.rows; row++) {
      for (let column = 0; column < COLUMNS; column++) {
        const n = this.counts[row * COLUMNS + column];
        if (n === 0) continue;
        context.globalAlpha = 0.2 + 0.8 * Math.log1p(n) / Math.log1p(this.most);
        context.fillStyle = warm;
        context.fillRect(x(column), y(row + 1), plot.width / COLUMNS + 0.3, plot.height / this.rows + 0.3);
      }
    }
    context.globalAlpha = 1;
    this.axes(context, plot, x, y);
    this.quantiles(context, plot, x);
    if (this.region) this.outline(context, plot);
    if (document.activeElement === this.canvas) {
      context.strokeStyle = colour('focus');
      context.lineWidth = 2;
      context.strokeRect(x(this.cursor.column), y(this.cursor.row + 1), plot.width / COLUMNS, plot.height / this.rows);
    }
  }

  // Behind the cells: hatched where there is no token, red where events were lost.
  columns(context, plot, x) {
    const hatch = context.createPattern(hatched(colour('line')), 'repeat'), lost = colour('lost');
    for (let column = 0; column * this.columnWidth < this.data.span && column < COLUMNS; column++) {
      const place = [x(column), 0, plot.width / COLUMNS + 0.3];
      if (this.isEmpty(column)) {
        context.fillStyle = hatch;
        context.fillRect(...place, plot.height);
      }
      if (this.lost[column].length === 0) continue;
      context.fillStyle = lost;
      context.globalAlpha = 0.12;
      context.fillRect(...place, plot.height);
      context.globalAlpha = 1;
      context.fillRect(...place, LOSS_STRIP);
    }
  }

  quantiles(context, plot, x) {
    for (const { name, dash, windows } of this.lines) {
      // The line below keeps the coloured one visible on cells.
      for (const [style, width] of [[colour('panel'), 4], [colour(name), 2]]) {
        context.strokeStyle = style;
        context.lineWidth = width;
        context.setLineDash(width === 2 ? dash : []);
        context.beginPath();
        for (const { first, end, value } of windows) {
          const y = this.rise(value, plot);
          for (let column = first; column < end; column++) {
            if (this.isEmpty(column)) continue;
            if (column === first || this.isEmpty(column - 1)) context.moveTo(x(column), y);
            context.lineTo(x(column + 1), y);
          }
        }
        context.stroke();
      }
      context.setLineDash([]);
    }
  }

  axes(context, plot, x, y) {
    context.fillStyle = colour('faint');
    context.strokeStyle = colour('line');
    context.textAlign = 'right';
    for (let row = 0; row < this.rows; row++) {
      if ((this.firstRow + row) % (ROWS_PER_DECADE / 2) !== 0) continue;
      context.fillText(duration(10 ** ((this.firstRow + row) / ROWS_PER_DECADE)), LEFT - 6, Math.max(10, y(row) + 4));
      context.strokeRect(LEFT, y(row), plot.width, 0);
    }
    for (let tick = 0; tick <= 10; tick++) {
      context.textAlign = tick === 10 ? 'right' : tick === 0 ? 'left' : 'center';
      const column = tick * COLUMNS / 10;
      context.fillText(`${(column * this.columnWidth / 1e6).toFixed(1)} s`, x(column), plot.height + 15);
    }
    context.textAlign = 'left';
  }

  // How far from the top a latency is.
  rise(us, plot) {
    if (us <= this.edges[0]) return plot.height;
    if (us >= this.edges[this.rows]) return 0;
    const row = this.rowOf(us), [a, b] = [this.edges[row], this.edges[row + 1]];
    return plot.height * (1 - (row + (us - a) / (b - a)) / this.rows);
  }

  // The region may come from a URL, and need not lie on cells.
  outline(context, plot) {
    const { from, to, low, high } = this.region;
    const place = (us) => LEFT + plot.width * Math.min(1, us / (COLUMNS * this.columnWidth));
    const rise = (us) => this.rise(us, plot);
    context.strokeStyle = colour('chosen');
    context.lineWidth = 2;
    context.strokeRect(place(from), rise(high), Math.max(2, place(to) - place(from)), Math.max(2, rise(low) - rise(high)));
  }
}
