// A terminal for the serial console of a machine. Built into a file of its own, which comes when it is needed.
import { FitAddon } from "@xterm/addon-fit";
import { type ITheme, Terminal } from "@xterm/xterm";

/** Fewer than the daemon takes in a message; what is pasted is sent in pieces. */
const PIECE = 32 << 10;

export interface OpenConsole {
  /** Puts the keyboard into the terminal. */
  focus(): void;
  close(): void;
}

/** Shows what the socket brings and sends what is typed, until either side ends it. */
export function openConsole(
  place: HTMLElement,
  socket: WebSocket,
  ended: (opened: boolean) => void,
): OpenConsole {
  const forbidStyles = allowOwnStyles();
  const terminal = new Terminal({
    fontFamily: "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace",
    fontSize: 13,
    scrollback: 5000,
    screenReaderMode: true,
    theme: THEME,
  });
  // All other keys are the guest's, so the keyboard needs one way out.
  terminal.attachCustomKeyEventHandler((event) => {
    if (!(event.ctrlKey && event.shiftKey && event.code === "KeyL")) return true;
    event.preventDefault();
    document.querySelector<HTMLElement>("h1")?.focus();
    return false;
  });
  const fit = new FitAddon();
  terminal.loadAddon(fit);
  terminal.open(place);
  fit.fit();
  const resized = new ResizeObserver(() => fit.fit());
  resized.observe(place);
  let opened = false;
  socket.onopen = () => {
    opened = true;
  };
  socket.onmessage = ({ data }: MessageEvent<ArrayBuffer>) => terminal.write(new Uint8Array(data));
  socket.onclose = () => ended(opened);
  const send = (bytes: Uint8Array<ArrayBuffer>) => {
    if (socket.readyState !== WebSocket.OPEN) return;
    for (let at = 0; at < bytes.length; at += PIECE) socket.send(bytes.subarray(at, at + PIECE));
  };
  terminal.onData((text) => send(new TextEncoder().encode(text)));
  terminal.onBinary((text) => send(Uint8Array.from(text, (one) => one.charCodeAt(0))));
  return {
    focus: () => terminal.focus(),
    close: () => {
      resized.disconnect();
      socket.onclose = null;
      socket.close();
      terminal.dispose();
      forbidStyles();
    },
  };
}

const THEME: ITheme = {
  background: "#10171a",
  foreground: "#d6dfe0",
  cursor: "#5cc8bb",
  selectionBackground: "#2c4a4d",
};

/**
 * Lets what is made from now on have styles: `style` elements and `style` attributes are set through the object
 * model. The page's policy forbids both as text, since text could come from elsewhere; the terminal writes its
 * own so. Returns what ends it.
 */
function allowOwnStyles(): () => void {
  const sheets: CSSStyleSheet[] = [];
  document.createElement = (name: string) => {
    const element: HTMLElement = Document.prototype.createElement.call(
      document,
      name === "style" ? "template" : name,
    );
    if (name === "style") sheets.push(styleByObject(element));
    if (name === "span") {
      element.setAttribute = function (key: string, value: string) {
        if (key === "style") this.style.cssText = value;
        else Element.prototype.setAttribute.call(this, key, value);
      };
    }
    return element;
  };
  return () => {
    document.createElement = Document.prototype.createElement;
    document.adoptedStyleSheets = document.adoptedStyleSheets.filter((sheet) => !sheets.includes(sheet));
  };
}

/** A style sheet that has whatever is written into the element. */
function styleByObject(element: HTMLElement): CSSStyleSheet {
  const sheet = new CSSStyleSheet();
  document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];
  Object.defineProperty(element, "textContent", { set: (text: string) => sheet.replaceSync(text) });
  return sheet;
}
