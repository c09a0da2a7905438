// Texts of elements, written only where they change: ten times a second most do not.

export function setText(element, value) {
  const text = String(value);
  if (element.textContent !== text) element.textContent = text;
}

export const counted = (count, name) => `${count.toLocaleString("en")} ${name}${count === 1 ? "" : "s"}`;
