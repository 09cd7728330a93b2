// The screen of a machine, with its keyboard and pointer. Built into a file of its own, which comes when it is
// needed.
import RFB from "@novnc/novnc";

/** Keys that leave the screen together with L: held by the guest until they are let go. */
const LEAVING: [number, string][] = [
  [0xffe3, "ControlLeft"],
  [0xffe4, "ControlRight"],
  [0xffe1, "ShiftLeft"],
  [0xffe2, "ShiftRight"],
];

export interface OpenDisplay {
  /** Puts the keyboard into the screen. */
  focus(): void;
  sendCtrlAltDel(): void;
  close(): void;
}

/** Shows what the socket brings, as large as there is room for, until either side ends it. */
export function openDisplay(
  place: HTMLElement,
  socket: WebSocket,
  ended: (opened: boolean) => void,
): OpenDisplay {
  const screen = new RFB(place, socket, { shared: true });
  screen.scaleViewport = true;
  screen.background = "#10171a";
  let [opened, closed] = [false, false];
  screen.addEventListener("connect", () => {
    opened = true;
    place.dataset.open = "true";
  });
  screen.addEventListener("disconnect", () => {
    delete place.dataset.open;
    if (!closed) ended(opened);
  });
  // All other keys are the guest's, so the keyboard needs one way out.
  const leave = (event: KeyboardEvent) => {
    if (!(event.ctrlKey && event.shiftKey && event.code === "KeyL")) return;
    event.preventDefault();
    event.stopPropagation();
    for (const [keysym, code] of LEAVING) screen.sendKey(keysym, code, false);
    document.querySelector<HTMLElement>("h1")?.focus();
  };
  place.addEventListener("keydown", leave, true);
  return {
    focus: () => screen.focus(),
    sendCtrlAltDel: () => screen.sendCtrlAltDel(),
    close: () => {
      closed = true;
      place.removeEventListener("keydown", leave, true);
      screen.disconnect();
    },
  };
}
