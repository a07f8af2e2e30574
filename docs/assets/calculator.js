/* Bytes of model state per process, by the table of the page guides/zero-stage. Loaded on every page, active on that
   one. */
"use strict";

/** Bytes of one process by tier. `states` is the number of fp32 values that the optimizer keeps per parameter. */
function dsxBytes({ parameters, ranks, stage, sixteenBit, states, optimizerHome, parameterHome }) {
  const share = (from) => (stage >= from ? parameters / ranks : parameters);
  const bytes = { device: 0, host: 0, disk: 0 };
  const put = (tier, amount) => { bytes[tier] += amount; };
  const away = stage >= 1 ? optimizerHome : "device";
  put(stage >= 3 ? parameterHome : "device", share(3) * (sixteenBit ? 2 : 4));
  put(stage >= 2 ? away : "device", share(2) * (sixteenBit ? 2 : 4)); // gradients follow the optimizer from stage 2 on
  put(away, share(1) * (4 * states + (sixteenBit ? 4 : 0)));
  return bytes;
}

function dsxCalculate(root) {
  const value = (name) => root.querySelector(`[name=${name}]`).value;
  const rows = [0, 1, 2, 3].map((stage) => {
    const bytes = dsxBytes({
      parameters: Number(value("parameters")) * 1e9,
      ranks: Math.max(1, Number(value("ranks"))),
      stage,
      sixteenBit: value("precision") === "16",
      states: Number(value("states")),
      optimizerHome: value("optimizer"),
      parameterHome: value("parameter"),
    });
    const gib = (amount) => (amount / 2 ** 30).toFixed(2);
    const cells = [stage, gib(bytes.device), gib(bytes.host), gib(bytes.disk)].map((text) => `<td>${text}</td>`);
    return `<tr>${cells.join("")}</tr>`;
  });
  document.querySelector("#dsx-bytes tbody").innerHTML = rows.join("");
}

if (typeof document !== "undefined") {
  document.addEventListener("DOMContentLoaded", () => {
    const root = document.querySelector(".dsx-calculator");
    if (!root) return;
    root.addEventListener("input", () => dsxCalculate(root));
    dsxCalculate(root);
  });
}
if (typeof module !== "undefined") module.exports = { dsxBytes };
