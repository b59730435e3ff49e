"use strict";
// The attention explorer: one front end for a page on disk and for the live page. Where the data come from is the
// business of a source: `look(image)` gives the photographs and predictions of an image for every model and view,
// `chunk(model, layer, image)` the maps and readings of one layer. live.js replaces the source of a page on disk.
(() => {
  const data = JSON.parse(document.getElementById("explorer-data").textContent);
  const stage = document.getElementById("stage");

  const create = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
      else if (value !== null) element.setAttribute(key, value);
    }
    element.append(...children);
    return element;
  };

  // A page on disk: chunks are in the page, or in scripts beside it that hand them over.
  function pageSource() {
    const waiting = new Map();
    window.vitfocusChunk = (key, views) => waiting.get(key)?.(views);
    const load = (key) => new Promise((resolve, reject) => {
      waiting.set(key, resolve);
      document.head.append(create("script", { src: data.files[key],
        onerror: () => reject(new Error(`the file ${data.files[key]} is missing; it belongs beside this page`)) }));
    });
    return {
      views: () => (data.against ? ["clean", data.against] : ["clean"]),
      look: async (image) => data.models.map((model) => ({ views: data.images[image].views, best: model.predictions[image] })),
      chunk: async (model, layer, image) => { const key = data.models[model].layers[layer].chunks[image]; return data.chunks[key] ?? load(key); },
      tag: (image) => String(image),
    };
  }
  const source = window.vitfocusLive ? window.vitfocusLive(data, create) : pageSource();

  const state = { image: 0, step: 1e9, head: -1, row: null, column: null, prefix: -1, pin: null, strength: 85, contrast: "shared",
    one: 0, two: data.models.length > 1 ? 1 : -1 };
  const shown = () => (state.two >= 0 && state.two !== state.one ? [state.one, state.two] : [state.one]);

  // Values are kept as levels of their square root.
  const SQUARE = Float32Array.from({ length: data.levels + 1 }, (_, level) => (level / data.levels) ** 2);
  const OVERLAY = ramp([[0, 0, 4], [87, 16, 110], [188, 55, 84], [249, 142, 9], [252, 255, 164]]);
  const MATRIX = ramp([[255, 255, 255], [253, 187, 132], [215, 48, 31], [103, 0, 13]]);
  function ramp(stops) {
    const colours = new Uint8ClampedArray(256 * 3);
    for (let i = 0; i < 256; i++) {
      const place = (i / 255) * (stops.length - 1), from = Math.min(Math.floor(place), stops.length - 2);
      for (let c = 0; c < 3; c++) colours[3 * i + c] = stops[from][c] + (stops[from + 1][c] - stops[from][c]) * (place - from);
    }
    return colours;
  }

  // The layer slider: for each step, the number of a layer for every model shown. Models of one depth are compared
  // layer by layer; models of different depths from the first of their layers to the last.
  function steps() {
    const models = shown().map((m) => data.models[m]);
    const depths = models.map((model) => model.layers.map((layer) => layer.depth));
    const common = depths[0].filter((depth) => depths.every((other) => other.includes(depth)));
    if (models.every((model) => model.blocks === models[0].blocks) && common.length) return common.map((depth) => depths.map((other) => other.indexOf(depth)));
    const most = Math.max(...depths.map((other) => other.length));
    return Array.from({ length: most }, (_, step) => depths.map((other) => Math.round((step / Math.max(1, most - 1)) * (other.length - 1))));
  }
  const layerNumber = (m) => steps()[state.step][shown().indexOf(m)];
  const layerOf = (m) => data.models[m].layers[layerNumber(m)];
  const first = () => layerOf(state.one);
  const headCount = () => Math.max(...shown().flatMap((m) => data.models[m].layers.map((layer) => layer.heads)));
  const headOf = (layer) => (state.head >= 0 ? Math.min(state.head, layer.heads - 1) : -1);
  const within = (value, count) => Math.max(0, Math.min(count - 1, Math.floor(value)));

  // --- the controls -------------------------------------------------------------------------------------------------
  function slider(name, key, range, words) {
    const output = create("output");
    const input = create("input", { type: "range", step: 1, "aria-label": name, "data-control": key,
      oninput: () => { state[key] = Number(input.value); changed(); } });
    const box = create("div", {}, create("label", {}, `${name}: `, output, input));
    box.show = () => {
      [input.min, input.max] = range();
      input.value = state[key];
      output.textContent = words();
      input.setAttribute("aria-valuetext", words());
    };
    return box;
  }
  function choice(name, key, options, parse = Number) {
    const select = create("select", { "aria-label": name, "data-control": key, onchange: () => { state[key] = parse(select.value); changed(); } });
    const box = create("div", {}, create("label", {}, `${name} `, select));
    box.show = () => {
      select.replaceChildren(...options().map(([value, words]) => create("option", { value }, words)));
      select.value = state[key];
    };
    return box;
  }
  const tokenName = (layer, index) => (layer.class && index === 0 ? "class token" : `token ${index} before the patches`);
  const layerWords = () => [...new Set(shown().map((m) => layerOf(m).depth))].join(" / ");
  const headWords = () => (state.head < 0 ? "all, averaged" : String(state.head));
  const controls = [
    slider("Layer", "step", () => [0, steps().length - 1], layerWords),
    slider("Head", "head", () => [-1, headCount() - 1], headWords),
    slider("Overlay", "strength", () => [0, 100], () => `${state.strength} %`),
    choice("Token", "prefix", () => [[-1, "patch pointed at"], ...Array.from({ length: first().prefix }, (_, i) => [i, tokenName(first(), i)])]),
    choice("Contrast", "contrast", () => [["shared", "same for all"], ["panel", "per panel"]], String),
  ];
  if (data.models.length > 2) {
    const names = data.models.map((model, m) => [m, model.name]);
    controls.unshift(choice("Model", "one", () => names), choice("beside", "two", () => [[-1, "none"], ...names]));
  }
  const pinButton = create("button", { type: "button", "data-control": "pin", onclick: () => togglePin() });
  const thumbs = create("div", { class: "thumbs", role: "group", "aria-label": "Images" });
  function showThumbs() {
    if (thumbs.children.length !== data.images.length) {
      thumbs.replaceChildren(...data.images.map((image, index) => create("button",
        { type: "button", title: image.name, "data-image": index, onclick: () => { state.image = index; changed(); } },
        create("img", { src: image.views[0], alt: image.name }))));
    }
    thumbs.querySelectorAll("button").forEach((button, i) => button.setAttribute("aria-pressed", i === state.image));
  }

  // --- the panels: one per model and view -----------------------------------------------------------------------------
  let panels = [];
  const grid = create("div", { class: "panels" });
  function buildPanels() {
    const wanted = JSON.stringify([shown(), source.views(), state.pin !== null]);
    if (grid.dataset.built === wanted) return;
    grid.dataset.built = wanted;
    panels = shown().flatMap((m) => source.views().map((view, v) => {
      const photos = (state.pin === null ? ["pointed"] : ["pinned", "pointed"]).map((kind) => ({ kind, canvas: create("canvas", { role: "img", "data-photo": kind }), words: create("span") }));
      const panel = { m, v, photos, matrix: create("canvas", { role: "img", class: "matrix" }), top: create("span", { class: "top" }), words: create("p"),
        best: create("ol", { class: "best" }), numbers: create("table", { class: "numbers" }), heading: create("h2", { title: data.models[m].name }, `${view.replaceAll("_", " ")} · ${data.models[m].name}`) };
      panel.element = create("figure", { class: "panel", "data-panel": `${m}.${v}` }, create("div", { class: "above" }, panel.heading, panel.top),
        create("div", { class: "photos" }, ...photos.map((photo) => create("div", {}, photo.canvas, photo.words))), panel.words,
        create("div", { class: "details" }, panel.matrix, create("div", {}, panel.best, panel.numbers)));
      for (const photo of photos) follow(photo.canvas, (x, y) => pointAtPhoto(x, y), true);
      follow(panel.matrix, (x, y) => pointAtMatrix(m, x, y), false);
      return panel;
    }));
    grid.replaceChildren(...panels.map((panel) => panel.element));
  }
  // The columns in which the photographs become largest, all of them inside the window where it is wide enough.
  function fit() {
    const gap = 20, bar = stage.querySelector(".controls"), pinned = state.pin === null ? 1 : 2;
    const wide = stage.clientWidth, high = window.innerHeight - bar.offsetHeight - 84;
    const picture = panels[0]?.shape ?? 1, count = panels.length;
    let best = { columns: 1, size: Math.min(wide, 560) };
    if (wide >= 700) {
      best.size = 0;
      for (let columns = 1; columns <= count; columns++) {
        if (count % columns) continue;  // full rows only
        const column = (wide - gap * (columns - 1)) / columns, rows = Math.ceil(count / columns);
        const size = Math.min((column - gap * (pinned - 1)) / pinned, Math.max(220, high / rows - 60) * picture);
        if (size >= best.size) best = { columns, size };
      }
    }
    grid.style.setProperty("--columns", best.columns);
    grid.style.setProperty("--photo", `${Math.floor(best.size)}px`);
    grid.classList.toggle("pinned", pinned > 1);
  }
  window.addEventListener("resize", () => { if (stage.clientWidth) { fit(); changed(); } });

  // Mouse, pen and touch; vertical swipes still scroll the page. A click of the mouse pins the token.
  function follow(canvas, act, pins) {
    const handle = (event) => {
      const box = canvas.getBoundingClientRect();
      act((event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
    };
    canvas.addEventListener("pointermove", handle);
    canvas.addEventListener("pointerdown", handle);
    if (pins) canvas.addEventListener("click", (event) => { if (event.pointerType === "mouse") togglePin(); });
  }
  function pointAtPhoto(x, y) {
    // The patch is kept on the grid of the first model; others take the patch at the same place.
    const [rows, columns] = first().queries;
    point(within(y * rows, rows), within(x * columns, columns));
  }
  const STRIP = 0.12;
  function pointAtMatrix(m, x, y) {
    const layer = layerOf(m), [rows, columns] = layer.queries, count = layer.prefix + rows * columns;
    const query = within(((y - STRIP) / (1 - STRIP)) * count, count);
    if (query < layer.prefix) { state.prefix = query; changed(); return; }
    const patch = query - layer.prefix, [ownRows, ownColumns] = first().queries;
    point(within(((Math.floor(patch / columns) + 0.5) / rows) * ownRows, ownRows), within((((patch % columns) + 0.5) / columns) * ownColumns, ownColumns));
  }
  function point(row, column) {
    if (row === state.row && column === state.column && state.prefix < 0) return;
    Object.assign(state, { row, column, prefix: -1 });
    changed();
  }
  const chosen = () => ({ row: state.row, column: state.column, prefix: state.prefix });
  function togglePin() {
    const same = state.pin && JSON.stringify(state.pin) === JSON.stringify(chosen());
    state.pin = state.pin === null || !same ? chosen() : null;
    changed();
  }
  const tokenWords = (token) => (token.prefix >= 0 ? tokenName(first(), token.prefix) : `patch in row ${token.row}, column ${token.column}`);

  stage.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || (event.target !== stage && event.target.matches("input, select, button"))) return;
    const [rows, columns] = first().queries, move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    const key = event.key.toLowerCase(), heads = headCount();
    if (move) point(within(state.row + move[0], rows), within(state.column + move[1], columns));
    else if (event.key === "PageUp") state.step = Math.min(steps().length - 1, state.step + 1);
    else if (event.key === "PageDown") state.step = Math.max(0, state.step - 1);
    else if (event.key === "h") state.head = state.head + 1 >= heads ? -1 : state.head + 1;
    else if (event.key === "H") state.head = state.head < 0 ? heads - 1 : state.head - 1;
    else if (key === "c" && first().prefix) state.prefix = state.prefix < 0 ? 0 : -1;
    else if (key === "p") togglePin();
    else if (/^[1-9]$/.test(event.key) && Number(event.key) <= data.images.length) state.image = Number(event.key) - 1;
    else return;
    event.preventDefault();
    changed();
  });

  // --- the state in the address: #explorer?image=1&layer=11&... ---------------------------------------------------------
  function writeAddress() {
    const place = state.prefix >= 0 ? `t${state.prefix}` : `${state.row}.${state.column}`;
    const values = { image: source.tag(state.image), layer: first().depth, head: state.head < 0 ? null : state.head, token: place,
      pin: state.pin && (state.pin.prefix >= 0 ? `t${state.pin.prefix}` : `${state.pin.row}.${state.pin.column}`), overlay: state.strength,
      contrast: state.contrast, models: data.models.length > 2 ? `${state.one}.${state.two}` : null, ...source.address?.() };
    const words = Object.entries(values).filter(([, value]) => value !== null && value !== undefined).map(([key, value]) => `${key}=${encodeURIComponent(value)}`);
    try { history.replaceState(null, "", `#explorer?${words.join("&")}`); } catch { /* a sandboxed page has no address */ }
  }
  const whole = (text) => (/^-?\d{1,6}$/.test(text ?? "") ? Number(text) : null);
  function token(text) {
    if (/^t\d{1,6}$/.test(text ?? "")) return { row: 0, column: 0, prefix: Number(text.slice(1)) };
    const parts = /^(\d{1,6})\.(\d{1,6})$/.exec(text ?? "");
    return parts && { row: Number(parts[1]), column: Number(parts[2]), prefix: -1 };
  }
  async function readAddress() {
    if (!location.hash.startsWith("#explorer?")) return;
    const values = new URLSearchParams(location.hash.slice(10));
    const models = /^(\d{1,4})\.(-?\d{1,4})$/.exec(values.get("models") ?? "");
    if (models && data.models[Number(models[1])]) { state.one = Number(models[1]); state.two = data.models[Number(models[2])] ? Number(models[2]) : -1; }
    await source.restore?.(values);
    const image = source.find ? source.find(values.get("image")) : whole(values.get("image"));
    if (image !== null && image >= 0 && image < data.images.length) state.image = image;
    const depth = whole(values.get("layer"));
    const step = steps().findIndex((numbers) => data.models[state.one].layers[numbers[0]].depth === depth);
    if (step >= 0) state.step = step;
    state.head = Math.min(whole(values.get("head")) ?? -1, headCount() - 1);
    Object.assign(state, token(values.get("token")) ?? {});
    state.pin = token(values.get("pin"));
    state.strength = Math.max(0, Math.min(100, whole(values.get("overlay")) ?? state.strength));
    if (values.get("contrast") === "panel") state.contrast = "panel";
  }

  // --- maps and photographs, unpacked when they are first shown; the oldest are forgotten ----------------------------------
  function remembering(most, make) {
    const kept = new Map();
    return (key, ...rest) => {
      const found = kept.get(key) ?? make(key, ...rest);
      kept.delete(key);
      kept.set(key, found);
      found.catch?.(() => kept.delete(key));
      if (kept.size > most) kept.delete(kept.keys().next().value);
      return found;
    };
  }
  const chunks = remembering(24, async (key, m, layer, image) => Promise.all((await source.chunk(m, layer, image)).map(unpack)));
  async function unpack(view) {
    const bytes = Uint8Array.from(atob(view.d), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const levels = new Uint8Array(await new Response(stream).arrayBuffer());
    const count = view.m.length, size = levels.length / count;
    const each = view.m.map((top, i) => Float32Array.from(levels.subarray(i * size, (i + 1) * size), (level) => SQUARE[level] * top));
    let mean = each[0];
    if (count > 1) { mean = new Float32Array(size); for (const one of each) for (let i = 0; i < size; i++) mean[i] += one[i] / count; }
    return { mean, each, readings: view.r, marks: view.k ?? [] };
  }
  const photographs = remembering(24, async (address) => {
    const picture = new Image();
    picture.src = address;
    await picture.decode();
    const grey = create("canvas", { width: picture.naturalWidth, height: picture.naturalHeight });
    const context = grey.getContext("2d", { willReadFrequently: true });
    context.drawImage(picture, 0, 0);
    const pixels = context.getImageData(0, 0, grey.width, grey.height);
    for (let i = 0; i < pixels.data.length; i += 4) {
      const light = 0.299 * pixels.data[i] + 0.587 * pixels.data[i + 1] + 0.114 * pixels.data[i + 2];
      pixels.data[i] = pixels.data[i + 1] = pixels.data[i + 2] = light;
    }
    context.putImageData(pixels, 0, 0);
    return { picture, grey };
  });

  function queryOf(layer, token) {
    if (token.prefix >= 0 && token.prefix < layer.prefix) return token.prefix;
    const [rows, columns] = layer.queries, [ownRows, ownColumns] = first().queries;
    const row = within(((token.row + 0.5) / ownRows) * rows, rows), column = within(((token.column + 0.5) / ownColumns) * columns, columns);
    return layer.prefix + row * columns + column;
  }
  // What a panel shows: the map, and the rows of it that were pointed at and pinned.
  async function look(panel, looked) {
    const layer = layerOf(panel.m), head = headOf(layer), { m, v } = panel;
    const views = await chunks([source.tag(state.image), m, layerNumber(m), ...source.views()].join("|"), m, layerNumber(m), state.image);
    const found = views[v], map = head < 0 ? found.mean : found.each[head];
    const queries = layer.prefix + layer.queries[0] * layer.queries[1], keys = layer.prefix + layer.keys[0] * layer.keys[1];
    const rows = panel.photos.map(({ kind }) => {
      const query = queryOf(layer, kind === "pinned" ? state.pin : state), row = new Float32Array(keys);
      for (let key = 0; key < keys; key++) row[key] = map[key * queries + query];
      return { query, row };
    });
    return { panel, layer, head, map, queries, keys, rows, found, best: looked[m].best[v] ?? [], photo: await photographs(looked[m].views[v]) };
  }

  // --- drawing --------------------------------------------------------------------------------------------------------
  const most = (row, layer) => Math.max(1e-9, ...row.subarray(layer.prefix));
  function drawPhoto(seen, index, top) {
    const { panel, layer, photo, found } = seen, { query, row } = seen.rows[index], { canvas, kind } = panel.photos[index];
    const shape = photo.picture.naturalWidth / photo.picture.naturalHeight;
    panel.shape = shape;
    const ratio = window.devicePixelRatio || 1, wide = Math.max(64, Math.round((canvas.clientWidth || 320) * ratio)), high = Math.round(wide / shape);
    if (canvas.width !== wide || canvas.height !== high) { canvas.width = wide; canvas.height = high; }
    const context = canvas.getContext("2d"), { width, height } = canvas, strength = state.strength / 100;
    context.imageSmoothingEnabled = photo.picture.naturalWidth > 64;
    context.drawImage(strength > 0 ? photo.grey : photo.picture, 0, 0, width, height);
    const [rows, columns] = layer.keys, small = create("canvas", { width: columns, height: rows }), pixels = new ImageData(columns, rows);
    for (let i = 0; i < rows * columns; i++) {
      const level = Math.max(0, Math.min(255, Math.round((255 * row[layer.prefix + i]) / top)));
      for (let c = 0; c < 3; c++) pixels.data[4 * i + c] = OVERLAY[3 * level + c];
      pixels.data[4 * i + 3] = 255 * (0.2 + 0.8 * Math.sqrt(level / 255));  // keeps the photograph visible where attention is low
    }
    small.getContext("2d").putImageData(pixels, 0, 0);
    context.imageSmoothingEnabled = false;
    context.globalAlpha = strength;
    context.drawImage(small, 0, 0, width, height);
    context.globalAlpha = 1;
    const [queryRows, queryColumns] = layer.queries, w = width / queryColumns, h = height / queryRows;
    for (const [x, y] of found.marks) {
      for (const [colour, thick] of [["#000", 2 * ratio + 2], ["#fff", 2 * ratio]]) {
        context.strokeStyle = colour; context.lineWidth = thick;
        context.beginPath(); context.arc(x * width, y * height, Math.min(w, h) / 3, 0, 7); context.stroke();
      }
    }
    if (query >= layer.prefix) {
      const patch = query - layer.prefix, x = (patch % queryColumns) * w, y = Math.floor(patch / queryColumns) * h, colour = kind === "pinned" ? "#d55e00" : "#0072b2";
      for (const [ink, thick] of [["#fff", 2.5 * ratio + 2.5], [colour, 2.5 * ratio]]) { context.strokeStyle = ink; context.lineWidth = thick; context.strokeRect(x, y, w, h); }
    }
  }

  // A map is painted once per scale; pointing only moves the frame of the row.
  const painted = new WeakMap();
  function paintedMatrix({ map, queries, keys }, top) {
    const before = painted.get(map);
    if (before && before.top === top) return before;
    const small = create("canvas", { width: keys, height: queries }), pixels = new ImageData(keys, queries), given = new Float32Array(keys);
    for (let key = 0; key < keys; key++) {
      for (let q = 0; q < queries; q++) {
        const value = map[key * queries + q], level = Math.min(255, Math.round((255 * value) / top)), at = 4 * (q * keys + key);
        given[key] += value / queries;
        pixels.data[at] = MATRIX[3 * level]; pixels.data[at + 1] = MATRIX[3 * level + 1]; pixels.data[at + 2] = MATRIX[3 * level + 2]; pixels.data[at + 3] = 255;
      }
    }
    small.getContext("2d").putImageData(pixels, 0, 0);
    painted.set(map, { top, small, given });
    return painted.get(map);
  }
  function drawMatrix(seen, top, highest) {
    const { panel, queries, keys } = seen, canvas = panel.matrix, size = 448, strip = Math.round(size * STRIP);
    if (canvas.width !== size) { canvas.width = size; canvas.height = size; }
    const context = canvas.getContext("2d"), { small, given } = paintedMatrix(seen, top), style = getComputedStyle(stage);
    context.fillStyle = style.getPropertyValue("--soft");
    context.fillRect(0, 0, size, strip);
    context.fillStyle = style.getPropertyValue("--c1");
    for (let key = 0; key < keys; key++) {
      const tall = Math.min(1, given[key] / highest) * (strip - 4);
      context.fillRect((key * size) / keys, strip - 2 - tall, Math.max(1, size / keys), tall);
    }
    context.imageSmoothingEnabled = keys > size;
    context.drawImage(small, 0, strip, size, size - strip);
    seen.rows.forEach(({ query }, index) => {
      const y = strip + ((query + 0.5) * (size - strip)) / queries;
      context.strokeStyle = panel.photos[index].kind === "pinned" ? "#d55e00" : "#0072b2";
      context.lineWidth = 2;
      context.strokeRect(1, y - Math.max(2, (size - strip) / queries / 2), size - 2, Math.max(4, (size - strip) / queries));
    });
  }
  const tails = new WeakMap();
  function tail(map) {
    if (!tails.has(map)) { const sorted = Float32Array.from(map).sort(); tails.set(map, Math.max(1e-9, sorted[Math.floor(0.995 * sorted.length)])); }
    return tails.get(map);
  }
  const received = (seen) => Math.max(1e-9, ...paintedMatrix(seen, tail(seen.map)).given);
  const percent = (value) => `${(100 * value).toPrecision(value < 0.1 ? 2 : 3)} %`;

  function tell(seen) {
    const { layer, head, panel, rows, found, best } = seen;
    rows.forEach(({ row }, index) => {
      const place = row.slice(layer.prefix).reduce((at, value, i, all) => (value > all[at] ? i : at), 0), photo = panel.photos[index];
      const parts = [`strongest patch: ${percent(row[layer.prefix + place])} at row ${Math.floor(place / layer.keys[1])}, column ${place % layer.keys[1]}`];
      for (let i = 0; i < layer.prefix; i++) parts.push(`${tokenName(layer, i)}: ${percent(row[i])}`);
      const token = photo.kind === "pinned" ? state.pin : state;
      photo.words.textContent = panel.photos.length > 1 ? `${photo.kind === "pinned" ? "Pinned" : "Pointed at"}: ${tokenWords(token)}. ${parts.join("; ")}.` : "";
      photo.canvas.setAttribute("aria-label", `${panel.heading.textContent}, ${tokenWords(token)}: ${parts.join("; ")}`);
      if (photo.kind === "pointed") panel.words.textContent = `Layer ${layer.depth}, ${head < 0 ? "average of heads" : `head ${head}`}; ${parts.join("; ")}.`;
    });
    panel.matrix.setAttribute("aria-label", `${panel.heading.textContent}: map of layer ${layer.depth}, ${seen.queries} by ${seen.keys} tokens`);
    panel.top.textContent = best.length ? `${best[0][0]} ${percent(best[0][1])}` : "";
    panel.best.replaceChildren(...best.map(([name, share]) => create("li", {}, create("span", {}, name), create("b", {}, percent(share)))));
    panel.best.hidden = !best.length;
    const readings = found.readings[head < 0 ? 0 : head + 1] ?? {};
    panel.numbers.replaceChildren(create("caption", {}, `Layer ${layer.depth}, ${head < 0 ? "all heads" : `head ${head}`}`),
      create("tbody", {}, ...Object.entries(data.headings).filter(([key]) => key in readings).map(([key, [heading, meaning]]) =>
        create("tr", { title: meaning || null }, create("th", { scope: "row" }, heading), create("td", { "data-reading": key }, readings[key])))));
  }

  const bars = [create("canvas", { width: 128, height: 8 }), create("canvas", { width: 128, height: 8 })];
  const tops = [create("span"), create("span")], marked = create("span", { hidden: "" }, "rings: patches whose tokens have a far higher norm than the others at the layer’s output");
  const status = create("p", { class: "quiet", role: "status", id: "said" }), alarm = create("p", { class: "alert", role: "alert", hidden: "" });
  [OVERLAY, MATRIX].forEach((colours, i) => {
    const context = bars[i].getContext("2d");
    for (let x = 0; x < 128; x++) { context.fillStyle = `rgb(${[...colours.slice(6 * x, 6 * x + 3)]})`; context.fillRect(x, 0, 1, 8); }
  });
  function keys() {
    const last = Math.min(9, data.images.length), key = (name) => create("kbd", {}, name);
    return [key("←↑↓→"), " patch  ", key("P"), " or click: pin it  ", key("PgUp"), " ", key("PgDn"), " layer  ", key("H"), " head  ",
      ...(last < 2 ? [] : [key("1"), "–", key(String(last)), " image  "]), key("C"), " class token"];
  }
  stage.setAttribute("tabindex", "0");
  stage.setAttribute("role", "group");
  stage.setAttribute("aria-label", "Attention explorer. Arrow keys move the patch, P pins it, Page Up and Page Down change the layer, H the head, number keys the image, C the class token.");
  stage.append(
    create("p", { class: "hint" }, source.hint ?? "Point at a patch of a photograph: the colours show what its token attends to. Click to pin a token and compare others with it."),
    ...(source.controls ?? []),
    create("div", { class: "controls" }, ...controls, create("div", {}, pinButton)), alarm, thumbs, grid,
    create("div", { class: "legend" }, create("span", {}, "attention of the chosen token: 0 ", bars[0], " ", tops[0]),
      create("span", {}, "map: 0 ", bars[1], " ", tops[1]), create("span", {}, "A map has one row per query and one column per key; the bars above it are the mean attention each token receives. A vertical line is a token that all others attend to: overfocus."), marked), status,
    create("p", { class: "quiet" }, ...keys()), ...data.notes.map((note) => create("p", { class: "quiet" }, note)));

  function showControls() {
    state.image = within(state.image, data.images.length);
    state.step = within(state.step, steps().length);
    const layer = first(), [rows, columns] = layer.queries;
    if (state.prefix >= layer.prefix) state.prefix = -1;
    if (state.pin && state.pin.prefix >= layer.prefix) state.pin = null;
    state.row = within(state.row ?? rows / 2, rows);
    state.column = within(state.column ?? columns / 2, columns);
    for (const one of controls) one.show();
    showThumbs();
    buildPanels();
    fit();
    pinButton.textContent = state.pin && JSON.stringify(state.pin) === JSON.stringify(chosen()) ? "Unpin this token" : state.pin ? "Pin this token instead" : "Pin this token";
    status.textContent = `${data.images[state.image]?.name ?? "no image"}, layer ${layerWords()}, head ${headWords()}: ${tokenWords(state)}.`;
  }

  let due = 0, addressed = 0;
  async function render(turn) {
    const looked = await source.look(state.image);
    if (turn !== due) return;
    const all = await Promise.all(panels.map((panel) => look(panel, looked)));
    if (turn !== due) return;
    const shape = all[0].photo.picture.naturalWidth / all[0].photo.picture.naturalHeight;
    if (panels[0].shape !== shape) { for (const panel of panels) panel.shape = shape; fit(); }
    const shared = state.contrast === "shared";
    const top = Math.max(...all.flatMap((seen) => seen.rows.map(({ row }) => most(row, seen.layer))));
    const mapTop = Math.max(...all.map((seen) => tail(seen.map))), highest = Math.max(...all.map(received));
    for (const seen of all) {
      seen.rows.forEach(({ row }, index) => drawPhoto(seen, index, shared ? top : most(row, seen.layer)));
      drawMatrix(seen, shared ? mapTop : tail(seen.map), shared ? highest : received(seen));
      tell(seen);
    }
    tops[0].textContent = shared ? percent(top) : "the panel’s strongest";
    tops[1].textContent = shared ? `${percent(mapTop)} or more` : "the panel’s strongest 0.5 %";
    alarm.hidden = true;
    marked.hidden = !all.some((seen) => seen.found.marks.length);
    stage.setAttribute("aria-busy", "false");
    clearTimeout(addressed);
    addressed = setTimeout(() => { if (stage.clientWidth) writeAddress(); }, 150);
  }
  function changed() {
    if (!data.images.length) return;
    showControls();
    stage.setAttribute("aria-busy", "true");
    const turn = ++due;
    requestAnimationFrame(() => { if (turn === due) render(turn).catch((error) => { if (turn === due) complain(error); }); });
  }
  function complain(error) {
    stage.setAttribute("aria-busy", "false");
    if (error.name === "AbortError") return;
    alarm.hidden = false;
    alarm.textContent = typeof DecompressionStream === "undefined" ? "This browser is too old to unpack the maps." : `That cannot be shown: ${error.message}.`;
  }
  source.start?.({ state, changed, complain });
  document.addEventListener("themechange", changed);
  document.addEventListener("explorershown", () => { if (stage.clientWidth) changed(); });
  readAddress().finally(changed);
})();
