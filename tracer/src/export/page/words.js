// Numbers as people read them, and elements whose content is text and never markup.

function duration(us) {
  if (us < 999.5) return `${us < 10 ? us.toFixed(1) : us.toFixed(0)} µs`;
  const [value, unit] = us < 999.5e3 ? [us / 1e3, 'ms'] : [us / 1e6, 's'];
  return `${value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0)} ${unit}`;
}

function count(n) {
  return Math.round(n).toString().replace(/\B(?=(\d{3})+$)/g, '\u202f');
}

const seconds = (us) => `${(us / 1e6).toFixed(3)} s`;
const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

const byId = (id) => document.getElementById(id);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// A row of a table; cells are text or elements, those from `numbers` on are figures.
function row(cells, numbers, tag = 'td') {
  const made = element('tr');
  cells.forEach((cell, i) => {
    const part = element(tag, i >= numbers ? 'number' : '');
    part.append(cell);
    made.append(part);
  });
  return made;
}

// Buttons of which one is pressed.
function choices(parent, options, choose) {
  parent.replaceChildren(...options.map(({ id, name }) => {
    const button = element('button', '', name);
    button.type = 'button';
    button.dataset.id = id;
    button.addEventListener('click', () => choose(id));
    return button;
  }));
  return (chosen) => {
    for (const button of parent.children) button.setAttribute('aria-pressed', String(button.dataset.id === chosen));
  };
}

// A piece of a hatched area.
function hatched(ink) {
  const piece = document.createElement('canvas');
  piece.width = piece.height = 6;
  const context = piece.getContext('2d');
  context.strokeStyle = ink;
  for (const shift of [-6, 0, 6]) {
    context.moveTo(shift - 1, 7);
    context.lineTo(shift + 7, -1);
  }
  context.stroke();
  return piece;
}

// A canvas as large as it is shown.
function sized(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext('2d');
  context.scale(ratio, ratio);
  context.font = '12px system-ui, sans-serif';
  return { context, width, height };
}
