"use strict";
(() => {
  const profile = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const scaled = (value, unit) => {
    if (!value) return unit ? `0 ${unit}` : "0";
    for (const [size, prefix] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]])
      if (Math.abs(value) >= size) return `${+(value / size).toPrecision(3)} ${prefix}${unit}`.trim();
    return `${value.toPrecision(3)} ${unit}`.trim();
  };
  const seconds = (value) => !value ? "0" : value >= 1 ? `${value.toPrecision(3)} s`
    : value >= 1e-3 ? `${(value * 1e3).toPrecision(3)} ms` : `${(value * 1e6).toPrecision(3)} \u00b5s`;

  const SUMMED = ["calls", "params", "flops", "seconds", "backward_flops", "backward_seconds"];

  // One record per module; `own` figures leave the children out, so that they add up to the whole.
  const records = [];
  const read = (node, depth, parent) => {
    const record = { ...node, kind: node.class, depth, parent, open: false, children: [],
      rate: node.seconds > 0 ? node.flops / node.seconds : 0 };
    const below = node.children.reduce((sum, child) => sum + child.params, 0);
    record.own = { name: node.name || "(model)", kind: record.kind, calls: node.calls, flops: node.own_flops,
      seconds: node.own_seconds, backward_flops: node.own_backward_flops, backward_seconds: node.own_backward_seconds,
      params: Math.max(0, node.params - below), rate: node.own_seconds > 0 ? node.own_flops / node.own_seconds : 0 };
    records.push(record);
    record.children = node.children.map((child) => read(child, depth + 1, record));
    return record;
  };
  const root = read(profile.modules, 0, null);
  const deepest = Math.max(...records.map((record) => record.depth));
  const whole = { params: root.params, flops: root.flops, seconds: root.seconds,
    backward_flops: root.backward_flops, backward_seconds: root.backward_seconds };

  const backward = profile.totals.backward_flops > 0;
  const columns = [
    { key: "name", title: "module" }, { key: "kind", title: "class" }, { key: "calls", title: "calls", show: String },
    { key: "params", title: "parameters", show: (v) => scaled(v, ""), bar: "params" },
    { key: "flops", title: "forward flops", show: (v) => scaled(v, ""), bar: "flops" },
    { key: "seconds", title: "forward time", show: seconds, bar: "time" },
    { key: "rate", title: "forward FLOPS", show: (v) => scaled(v, "FLOPS") },
    ...(backward ? [
      { key: "backward_flops", title: "backward flops", show: (v) => scaled(v, ""), bar: "flops" },
      { key: "backward_seconds", title: "backward time", show: seconds, bar: "bwd" }] : []),
  ];
  const state = { key: null, falling: true, view: "tree", find: "" };

  const compare = (a, b) => {
    const [x, y] = [a[state.key], b[state.key]];
    const order = typeof x === "string" ? x.localeCompare(y, undefined, { numeric: true }) : x - y;
    return state.falling ? -order : order;
  };
  const sorted = (list) => state.key === null ? list : [...list].sort(compare);

  const matches = (record) => {
    const wanted = state.find.toLowerCase();
    return wanted && (record.name.toLowerCase().includes(wanted) || record.kind.toLowerCase().includes(wanted));
  };
  const treeRows = () => {
    const rows = [];
    // While searching, a module is shown if it or something below it matches, unfolded down to the matches.
    const hit = (record) => matches(record) || record.children.some(hit);
    const walk = (record) => {
      if (state.find && !hit(record)) return;
      rows.push(record);
      if (record.open || (state.find && record.children.some(hit))) sorted(record.children).forEach(walk);
    };
    walk(root);
    return rows;
  };
  const flatRows = () => {
    const found = records.filter((record) => !state.find || matches(record));
    return sorted(found.map((record) => ({ ...record.own, source: record })));
  };
  const classRows = () => {
    const sums = new Map();
    for (const { own } of records) {
      const none = Object.fromEntries(SUMMED.map((key) => [key, 0]));
      const sum = sums.get(own.kind) ?? { name: "", kind: own.kind, ...none, modules: 0 };
      for (const key of SUMMED) sum[key] += own[key];
      sum.modules += 1;
      sums.set(own.kind, sum);
    }
    for (const sum of sums.values()) {
      sum.name = sum.modules === 1 ? "1 module" : `${sum.modules} modules`;
      sum.rate = sum.seconds > 0 ? sum.flops / sum.seconds : 0;
    }
    const find = state.find.toLowerCase();
    return sorted([...sums.values()].filter((row) => !find || row.kind.toLowerCase().includes(find)));
  };

  const nameCell = (row) => {
    const cell = make("td");
    if (state.view !== "tree") { cell.append(row.name); return cell; }
    cell.style.paddingLeft = `${10 + row.depth * 18}px`;
    if (row.children.length) {
      const open = row.open || state.find !== "";
      const said = { "aria-expanded": String(open), "aria-label": `fold ${row.name || "model"}` };
      const fold = make("button", { type: "button", class: "fold", ...said }, open ? "\u25be" : "\u25b8");
      fold.addEventListener("click", () => { row.open = !row.open; draw(); });
      cell.append(fold);
    } else cell.append(make("span", { class: "leaf" }));
    const above = row.parent?.name ? `${row.parent.name}.` : "";
    cell.append(row.name ? (row.name.startsWith(above) ? row.name.slice(above.length) : row.name) : "(model)");
    cell.title = [row.name, row.kind].filter(Boolean).join(", ");
    return cell;
  };
  const cellOf = (column, row) => {
    if (column.key === "name") return nameCell(row);
    const value = row[column.key];
    if (!column.bar) return make("td", {}, column.show ? column.show(value) : value);
    const share = whole[column.key] ? value / whole[column.key] : 0;
    const bar = make("i", { class: column.bar });
    bar.style.width = `${(100 * Math.min(1, share)).toFixed(2)}%`;
    const percent = make("small", {}, `${(100 * share).toFixed(1)}%`);
    return make("td", { class: "bar" }, bar, make("span", {}, column.show(value), percent));
  };
  const draw = () => {
    document.getElementById("modules").dataset.view = state.view;
    const rows = { tree: treeRows, flat: flatRows, class: classRows }[state.view]();
    const body = document.querySelector("#modules tbody");
    const rowOf = (row) =>
      make("tr", matches(row) ? { class: "found" } : {}, ...columns.map((column) => cellOf(column, row)));
    body.replaceChildren(...rows.map(rowOf));
    document.querySelectorAll("#modules thead th").forEach((head, index) => {
      if (columns[index].key === state.key) head.setAttribute("aria-sort", state.falling ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
  };
  const unfoldTo = (depth) => { for (const record of records) record.open = record.depth < depth; };

  const tile = (name, value, note = "") =>
    make("div", { class: "tile" }, make("span", {}, name), make("b", {}, value), make("i", {}, note));
  const totals = profile.totals;
  $("tiles").append(
    tile("parameters", scaled(root.params, ""), "shared ones once"),
    tile("forward", scaled(root.flops, "flops"), `${scaled(root.macs, "MACs")} in ${seconds(root.seconds)}`),
    tile("forward speed", scaled(root.rate, "FLOPS"), "on this process"),
  );
  if (backward) $("tiles").append(
    tile("backward", scaled(totals.backward_flops, "flops"), `in ${seconds(totals.backward_seconds)}`),
    tile(
      "backward / forward",
      (totals.backward_flops / (root.flops || 1)).toFixed(2),
      totals.recompute_flops ? `${scaled(totals.recompute_flops, "flops")} recomputed` : "measured",
    ),
  );
  const unknown = Object.keys(totals.unknown);
  if (unknown.length) $("tiles").append(tile("not counted", String(unknown.length), unknown.slice(0, 3).join(", ")));

  document.querySelector("#modules thead tr").append(...columns.map((column) => {
    const button = make("button", { type: "button" }, column.title);
    button.addEventListener("click", () => {
      const falls = column.key !== "name" && column.key !== "kind";
      if (state.key === column.key && state.falling === falls) state.falling = !falls;
      else if (state.key === column.key) state.key = null;  // the third click gives the order of calls back
      else { state.key = column.key; state.falling = falls; }
      draw();
    });
    return make("th", { scope: "col" }, button);
  }));
  const depth = $("depth");
  depth.max = String(deepest);
  depth.value = String(Math.min(2, deepest));
  const setDepth = (value) => {
    depth.value = String(value);
    $("depth-shown").textContent = String(value);
    unfoldTo(+value);
    draw();
  };
  depth.addEventListener("input", () => setDepth(+depth.value));
  $("unfold").addEventListener("click", () => setDepth(deepest));
  $("fold").addEventListener("click", () => setDepth(0));
  $("view").addEventListener("change", (event) => {
    state.view = event.target.value;
    if (state.view !== "tree" && state.key === null) { state.key = "seconds"; state.falling = true; }
    draw();
  });
  $("find").addEventListener("input", (event) => { state.find = event.target.value.trim(); draw(); });
  setDepth(Math.min(2, deepest));
})();
