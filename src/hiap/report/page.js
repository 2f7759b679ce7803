"use strict";
const tip = document.getElementById("tip");
const text = (value) => document.createTextNode(value);

function place(event) {
  tip.hidden = false;
  const left = Math.min(Math.max(event.clientX + 14, 8), innerWidth - tip.offsetWidth - 8);
  const above = event.clientY - tip.offsetHeight - 14;
  tip.style.left = left + "px";
  tip.style.top = (above > 8 ? above : event.clientY + 18) + "px";
}

function show(event, title, rows) {
  const head = document.createElement("b");
  head.append(title);
  tip.replaceChildren(head);
  for (const [colour, words] of rows) {
    const row = document.createElement("div");
    if (colour) row.append(Object.assign(document.createElement("i"), { style: "background:" + colour }));
    row.append(text(words));
    tip.append(row);
  }
  place(event);
}

function nearest(values, x) {
  let best = 0;
  values.forEach((value, i) => { if (Math.abs(value - x) < Math.abs(values[best] - x)) best = i; });
  return best;
}

for (const figure of document.querySelectorAll(".chart")) {
  const svg = figure.querySelector("svg");
  const data = JSON.parse(figure.querySelector("script").textContent);
  const [left, top, width, height] = data.box;
  const rule = document.createElementNS("http://www.w3.org/2000/svg", "line");
  rule.setAttribute("class", "rule");
  const start = data.start || 0;
  const axis = data.axis || "epoch";

  const point = (event) => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const share = (at.x - left) / width, down = (at.y - top) / height;
    if (share < -0.02 || share > 1.02 || down < -0.1 || down > 1.1) return leave();
    const x = start + Math.min(Math.max(share, 0), 1) * (data.end - start);
    let shown = x;
    if (data.kind === "lines") {
      const times = [...new Set(data.series.filter((one) => !one.level).flatMap((one) => one.x))];
      shown = times[nearest(times, x)];
      const known = data.series.filter((one) => one.level || one.x.includes(shown));
      const rows = known.map((one) => [one.colour, one.name + " " + one.y[one.level ? 0 : one.x.indexOf(shown)]]);
      show(event, axis + " " + +shown.toFixed(2), rows);
    } else {
      const row = Math.min(Math.max(Math.floor((data.up ? 1 - down : down) * data.tips.length), 0), data.tips.length - 1);
      let column = 0;
      data.x.forEach((time, i) => { if (time <= x) column = i; });
      show(event, axis + " " + +data.x[column].toFixed(2), [["", data.tips[row][column]]]);
    }
    const across = left + ((shown - start) / (data.end - start)) * width;
    for (const [name, value] of [["x1", across], ["x2", across], ["y1", top], ["y2", top + height]]) rule.setAttribute(name, value);
    svg.append(rule);
  };
  const leave = () => { tip.hidden = true; rule.remove(); };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", leave);
}

for (const part of document.querySelectorAll("[data-tip]")) {
  const over = (event) => show(event, part.dataset.tip, []);
  part.addEventListener("pointermove", over);
  part.addEventListener("pointerdown", over);
  part.addEventListener("pointerleave", () => { tip.hidden = true; });
}

for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", async () => {
    const rows = [...document.getElementById(button.dataset.copy).rows];
    const lines = rows.map((row) => [...row.cells].map((cell) => cell.textContent).join("\t")).join("\n");
    try {
      await navigator.clipboard.writeText(lines);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(document.getElementById(button.dataset.copy));
      button.textContent = document.execCommand("copy") ? "Copied" : "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}

addEventListener("beforeprint", () => { for (const one of document.querySelectorAll("details.rung")) one.open = true; });
