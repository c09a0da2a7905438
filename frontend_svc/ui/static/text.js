// Texts of elements, and how ids and counts are written.

const ID_CHARACTERS = 8; // enough to tell open requests apart: ids are random

// Writes only where the text changes: ten times a second most do not.
export function setText(element, value) {
  const text = String(value);
  if (element.textContent !== text) element.textContent = text;
}

export const counted = (count, name) => `${count.toLocaleString("en")} ${name}${count === 1 ? "" : "s"}`;

export const shortId = (id) => id.slice(0, ID_CHARACTERS);

// Small shares with a decimal: few requests hold little of a large cache.
export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

// Returns whether the clipboard took the text: without TLS only pages of this machine may write to it.
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}
