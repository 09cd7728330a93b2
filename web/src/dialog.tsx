// Questions before something is done: what will happen, what it needs to know, and two buttons.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { Store } from "./store";

export interface Field {
  name: string;
  label: string;
  kind?: "text" | "number" | "check" | "choice";
  value?: string;
  choices?: { value: string; label: string }[];
  hint?: string;
  optional?: boolean;
}

export interface Question {
  title: string;
  text?: ComponentChildren;
  fields?: Field[];
  button: string;
  /** Whether it destroys something. */
  danger?: boolean;
}

export type Answers = Record<string, string>;

const open = new Store<{ question: Question; answer: (given: Answers | undefined) => void } | undefined>(
  undefined,
);

/** Asks; the answers by the names of the fields, or nothing if the user leaves it. */
export const ask = (question: Question): Promise<Answers | undefined> =>
  new Promise((answer) => open.set({ question, answer }));

export function Dialogs() {
  const asked = open.use();
  if (!asked) return null;
  const end = (given: Answers | undefined) => {
    open.set(undefined);
    asked.answer(given);
  };
  return <Dialog key={asked.question.title} question={asked.question} end={end} />;
}

function Dialog({ question, end }: { question: Question; end: (given: Answers | undefined) => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const before = document.activeElement;
    dialog.current?.showModal();
    // The keyboard goes on where it was.
    return () => before instanceof HTMLElement && before.focus();
  }, []);
  const submit = (event: SubmitEvent) => {
    event.preventDefault();
    const given: Answers = {};
    for (const [name, value] of new FormData(event.target as HTMLFormElement))
      given[name] = String(value).trim();
    end(given);
  };
  return (
    <dialog ref={dialog} aria-labelledby="dialog-title" onClose={() => end(undefined)}>
      <form onSubmit={submit}>
        <h2 id="dialog-title">{question.title}</h2>
        {question.text && <div class="dialog-text">{question.text}</div>}
        {question.fields?.map((field) => (
          <Input key={field.name} field={field} />
        ))}
        <div class="buttons">
          <button type="button" onClick={() => end(undefined)}>
            Cancel
          </button>
          <button type="submit" class={question.danger ? "danger" : "primary"}>
            {question.button}
          </button>
        </div>
      </form>
    </dialog>
  );
}

function Input({ field }: { field: Field }) {
  const [value, set] = useState(field.value ?? "");
  const id = `field-${field.name}`;
  const hint = field.hint ? `${id}-hint` : undefined;
  const change = (event: Event) => set((event.target as HTMLInputElement).value);
  if (field.kind === "check") {
    return (
      <label class="check">
        <input type="checkbox" name={field.name} value="yes" /> {field.label}
      </label>
    );
  }
  const common = { id, name: field.name, value, required: !field.optional, "aria-describedby": hint };
  return (
    <div class="field">
      <label for={id}>{field.label}</label>
      {field.kind === "choice" ? (
        <select {...common} onChange={change}>
          {field.choices?.map((one) => (
            <option key={one.value} value={one.value}>
              {one.label}
            </option>
          ))}
        </select>
      ) : (
        <input
          {...common}
          type={field.kind ?? "text"}
          min={1}
          autocomplete="off"
          spellcheck={false}
          onInput={change}
        />
      )}
      {field.hint && (
        <p class="hint" id={hint}>
          {field.hint}
        </p>
      )}
    </div>
  );
}
