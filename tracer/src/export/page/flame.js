// The flame graph of a selection, root on top. Each frame is a button; arrows walk the tree.

const ROW = 20, LEAST_SHARE = 0.0008;

class Flame {
  constructor(box, status) {
    Object.assign(this, { box, status, mode: 'time', query: '' });
    box.addEventListener('keydown', (event) => this.key(event));
  }

  show(tree, tokens, comparable) {
    Object.assign(this, { tree, tokens, comparable, zoom: tree });
    this.draw();
  }

  draw() {
    this.frames = new Map();
    const made = document.createDocumentFragment();
    const path = [];
    for (let node = this.zoom; node; node = node.parent) path.unshift(node);
    path.slice(0, -1).forEach((node, depth) => made.append(this.frame(node, depth, 0, 1)));
    let hidden = 0, deepest = 0;
    const place = (node, depth, left, share) => {
      if (share < LEAST_SHARE) { hidden++; return; }
      deepest = Math.max(deepest, depth);
      made.append(this.frame(node, depth, left, share));
      const children = [...node.children.values()].filter((child) => child.value > 0);
      children.sort((a, b) => (a.name < b.name ? -1 : 1));
      for (const child of children) {
        const part = this.zoom.value > 0 ? child.value / this.zoom.value : 0;
        place(child, depth + 1, left, part);
        left += part;
      }
    };
    if (this.zoom.value > 0) place(this.zoom, path.length - 1, 0, 1);
    this.box.replaceChildren(made);
    this.box.style.height = `${(deepest + 1) * ROW}px`;
    const first = this.box.firstElementChild;
    if (first) first.tabIndex = 0;
    this.hidden = hidden;
    this.say();
  }

  frame(node, depth, left, share) {
    const button = element('button', 'frame', node.name);
    button.type = 'button';
    button.tabIndex = -1;
    button.setAttribute('role', 'treeitem');
    button.setAttribute('aria-level', String(depth + 1));
    button.style.left = `${100 * left}%`;
    button.style.width = `${100 * share}%`;
    button.style.top = `${depth * ROW}px`;
    button.style.background = this.colour(node, depth);
    button.title = this.describe(node);
    if (depth === 2 && this.mode === 'time') button.classList.add('of-part');
    if (this.matches(node)) button.classList.add('hit');
    button.addEventListener('click', () => { this.zoom = node; this.draw(); this.focus(node); });
    button.addEventListener('focus', () => { this.status.textContent = this.describe(node); });
    this.frames.set(node, button);
    return button;
  }

  colour(node, depth) {
    if (this.mode === 'difference' && this.comparable) {
      const grown = (node.value - node.usual) / Math.max(1, this.tree.value, this.tree.usual);
      const strength = Math.min(1, Math.sqrt(Math.abs(grown)) * 1.6);
      return `color-mix(in srgb, ${grown > 0 ? '#e5484d' : '#3b82f6'} ${Math.round(100 * strength)}%, var(--equal))`;
    }
    if (depth < 2) return 'var(--equal)';
    const part = depth === 2 && node.name.split(':')[0];
    if (part) return `var(--${part.replace(/[^a-z_]/g, '')}, var(--frame))`;
    return node.name.endsWith('_[k]') ? 'var(--kernel)' : 'var(--frame)';
  }

  matches(node) { return this.query !== '' && node.name.toLowerCase().includes(this.query); }

  describe(node) {
    const mean = (us) => duration(us / Math.max(1, this.tokens));
    const usual = this.comparable ? `; usually ${mean(node.usual)}` : '';
    return `${node.name}: ${mean(node.value)} a token, ${percent(node.value / Math.max(1, this.tree.value))}${usual}`;
  }

  // What matches the search, counted where it is nearest to the root.
  say() {
    const notes = [];
    if (this.query) {
      let found = 0;
      const walk = (node) => { if (this.matches(node)) found += node.value; else node.children.forEach(walk); };
      walk(this.tree);
      notes.push(`“${this.query}” is in ${percent(found / Math.max(1, this.tree.value))} of the time`);
    }
    if (this.mode === 'difference') {
      notes.push(this.comparable ? 'red: longer than usual, blue: shorter (usual: the middle half of all other tokens)'
        : 'select tokens to compare them with the middle half of all others');
    }
    if (this.hidden) notes.push(`${count(this.hidden)} frames are too narrow to be shown`);
    this.status.textContent = notes.join(' · ');
  }

  focus(node) {
    const button = this.frames.get(node);
    if (!button) return;
    for (const other of this.box.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
    button.tabIndex = 0;
    button.focus();
  }

  key(event) {
    const node = [...this.frames].find(([, button]) => button === document.activeElement)?.[0];
    if (!node) return;
    const shown = (of) => [...of.children.values()].filter((child) => this.frames.has(child))
      .sort((a, b) => (a.name < b.name ? -1 : 1));
    const siblings = node.parent ? shown(node.parent) : [node];
    const at = siblings.indexOf(node);
    const next = { ArrowDown: shown(node)[0], ArrowUp: node.parent, ArrowLeft: siblings[at - 1],
      ArrowRight: siblings[at + 1] };
    if (event.key === 'Escape') { this.zoom = this.tree; this.draw(); this.focus(this.tree); }
    else if (event.key in next) { if (next[event.key]) this.focus(next[event.key]); }
    else return;
    event.preventDefault();
  }
}
