//! Recipes of images: the instructions of a Dockerfile that make a disk, for a machine in place of a
//! container. Pure.
//!
//! Source: Dockerfile reference of Docker 27, for the instructions that are here. A line that ends in `\`
//! goes on in the next one, a line that begins with `#` is a comment, and a command in `[…]` is JSON.

use crate::first_boot;
use whimbrel_api::ImageName;

/// What an image is to be made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Recipe {
    /// The image that it begins with.
    pub(crate) from: ImageName,
    pub(crate) steps: Vec<Step>,
}

/// An instruction, and where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Step {
    /// Number of its first line, from 1.
    pub(crate) line: usize,
    /// The instruction as it is written, on one line.
    pub(crate) text: String,
    pub(crate) instruction: Instruction,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Instruction {
    /// Run a program with its arguments.
    Run(Vec<String>),
    /// Copy files and folders of the context to a path in the guest.
    Copy { from: Vec<String>, to: String },
    /// Set a variable for what follows, and for the program of a container image.
    Env(String, String),
    /// Run what follows in a folder, which is made.
    Workdir(String),
    /// Give the image a label.
    Label(String, String),
    /// Have the machine of a container image run this program.
    Cmd(Vec<String>),
}

/// An instruction that cannot be understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub(crate) struct BadRecipe {
    line: usize,
    problem: String,
}

impl Recipe {
    pub(crate) fn parse(text: &str) -> Result<Self, BadRecipe> {
        let mut from = None;
        let mut steps = Vec::new();
        for (line, text) in instructions(text) {
            let bad = |problem: String| BadRecipe { line, problem };
            let (word, rest) = text.split_once(char::is_whitespace).unwrap_or((&text, ""));
            let rest = rest.trim();
            if from.is_none() {
                if !word.eq_ignore_ascii_case("FROM") {
                    return Err(bad(format!(
                        "{word} comes before FROM, which names the image to begin with"
                    )));
                }
                from = Some(
                    rest.parse().map_err(|error| bad(format!("{rest:?} is no name of an image: {error}")))?,
                );
                continue;
            }
            let instruction = instruction(word, rest).map_err(bad)?;
            steps.push(Step { line, text, instruction });
        }
        let from = from.ok_or_else(|| BadRecipe { line: 1, problem: "there is no FROM IMAGE".to_owned() })?;
        Ok(Self { from, steps })
    }
}

/// Instructions with the numbers of their first lines, each on one line.
fn instructions(text: &str) -> Vec<(usize, String)> {
    let mut all = Vec::new();
    let mut open: Option<(usize, String)> = None;
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.starts_with('#') || (line.is_empty() && open.is_none()) {
            continue;
        }
        let (part, goes_on) = line.strip_suffix('\\').map_or((line, false), |part| (part, true));
        let (_, whole) = open.get_or_insert_with(|| (number, String::new()));
        if !whole.is_empty() && !part.is_empty() {
            whole.push(' ');
        }
        whole.push_str(part.trim());
        if !goes_on {
            all.extend(open.take());
        }
    }
    all.extend(open);
    all.retain(|(_, text)| !text.is_empty());
    all
}

fn instruction(word: &str, rest: &str) -> Result<Instruction, String> {
    let missing = |what: &str| format!("{word} needs {what}");
    match word.to_ascii_uppercase().as_str() {
        "RUN" if rest.is_empty() => Err(missing("a command")),
        "RUN" => words_of(rest).map(Instruction::Run),
        "CMD" if rest.is_empty() => Err(missing("a command")),
        "CMD" => words_of(rest).map(Instruction::Cmd),
        "COPY" => copy(rest),
        "ENV" => first_boot::variable(rest)
            .map(|(name, value)| Instruction::Env(name, unquoted(&value).to_owned()))
            .map_err(|problem| format!("{word}: {problem}")),
        "LABEL" => match rest.split_once('=') {
            Some((name, value)) if !name.is_empty() => {
                Ok(Instruction::Label(name.to_owned(), unquoted(value).to_owned()))
            }
            _ => Err(missing("NAME=VALUE")),
        },
        "WORKDIR" if rest.starts_with('/') => Ok(Instruction::Workdir(rest.to_owned())),
        "WORKDIR" => Err(missing("a path that begins with /")),
        "FROM" => Err("a recipe has one FROM".to_owned()),
        _ => Err(format!("{word} is not known here; FROM, RUN, COPY, ENV, WORKDIR, LABEL and CMD are")),
    }
}

/// The words of a command: a list in JSON, or a line for the shell.
fn words_of(text: &str) -> Result<Vec<String>, String> {
    if !text.starts_with('[') {
        return Ok(["/bin/sh", "-c", text].map(str::to_owned).to_vec());
    }
    match serde_json::from_str::<Vec<String>>(text) {
        Ok(words) if !words.is_empty() => Ok(words),
        Ok(_) => Err("the list has no program".to_owned()),
        Err(error) => Err(format!("this is no list of words in JSON: {error}")),
    }
}

fn copy(rest: &str) -> Result<Instruction, String> {
    let mut words: Vec<String> = match rest.starts_with('[') {
        true => words_of(rest)?,
        false => rest.split_whitespace().map(str::to_owned).collect(),
    };
    if let Some(flag) = words.first().filter(|word| word.starts_with("--")) {
        return Err(format!("COPY {flag} is not known here"));
    }
    let to = words.pop().filter(|_| !words.is_empty());
    let to = to.ok_or("COPY needs what to copy, and a path in the machine")?;
    if let Some(pattern) = words.iter().find(|word| word.contains(['*', '?'])) {
        return Err(format!("COPY takes names and no patterns: {pattern}"));
    }
    let is_inside = |word: &String| {
        use std::path::{Component, Path};
        Path::new(word).components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir))
    };
    match words.iter().find(|word| !is_inside(word)) {
        Some(outside) => Err(format!("{outside} leads out of the folder of the recipe")),
        None => Ok(Instruction::Copy { from: words, to }),
    }
}

fn unquoted(text: &str) -> &str {
    ['"', '\''].iter().find_map(|quote| text.strip_prefix(*quote)?.strip_suffix(*quote)).unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn a_recipe_has_its_instructions_with_their_lines() {
        let text = "# a site\nFROM debian/12\n\nRUN apt-get update && \\\n    # not now\n    apt-get -y install nginx\n\
                    copy site conf/nginx.conf /srv/\nENV GREETING=\"it's a day\"\nWORKDIR /srv\nLABEL a=b=c\n\
                    RUN [\"echo\", \"a b\"]\nCMD [\"nginx\", \"-g\", \"daemon off;\"]\n";
        let recipe = Recipe::parse(text).unwrap();
        assert_eq!(recipe.from.to_string(), "debian/12");
        let lines: Vec<_> = recipe.steps.iter().map(|step| step.line).collect();
        assert_eq!(lines, [4, 7, 8, 9, 10, 11, 12]);
        assert_eq!(recipe.steps[0].text, "RUN apt-get update && apt-get -y install nginx");
        let instructions: Vec<_> = recipe.steps.into_iter().map(|step| step.instruction).collect();
        assert_eq!(
            instructions,
            [
                Instruction::Run(words(&["/bin/sh", "-c", "apt-get update && apt-get -y install nginx"])),
                Instruction::Copy { from: words(&["site", "conf/nginx.conf"]), to: "/srv/".to_owned() },
                Instruction::Env("GREETING".to_owned(), "it's a day".to_owned()),
                Instruction::Workdir("/srv".to_owned()),
                Instruction::Label("a".to_owned(), "b=c".to_owned()),
                Instruction::Run(words(&["echo", "a b"])),
                Instruction::Cmd(words(&["nginx", "-g", "daemon off;"])),
            ]
        );
    }

    #[test]
    fn what_cannot_be_done_is_said_with_its_line() {
        let cases = [
            ("", "line 1: there is no FROM"),
            ("RUN true\nFROM a/b\n", "line 1: RUN comes before FROM"),
            ("FROM ../x\n", "line 1: \"../x\" is no name"),
            ("FROM a/b\nFROM c/d\n", "line 2: a recipe has one FROM"),
            ("FROM a/b\n\nEXPOSE 80\n", "line 3: EXPOSE is not known here"),
            ("FROM a/b\nRUN\n", "line 2: RUN needs a command"),
            ("FROM a/b\nRUN [\"a\",\n", "line 2: this is no list"),
            ("FROM a/b\nCOPY x\n", "line 2: COPY needs what"),
            ("FROM a/b\nCOPY ../x /\n", "line 2: ../x leads out"),
            ("FROM a/b\nCOPY /etc/shadow /\n", "line 2: /etc/shadow leads out"),
            ("FROM a/b\nCOPY *.conf /etc/\n", "line 2: COPY takes names"),
            ("FROM a/b\nCOPY --from=x a /\n", "line 2: COPY --from=x"),
            ("FROM a/b\nENV 1=2\n", "line 2: ENV:"),
            ("FROM a/b\nWORKDIR srv\n", "line 2: WORKDIR needs a path"),
        ];
        for (text, said) in cases {
            let refused = Recipe::parse(text).unwrap_err().to_string();
            assert!(refused.contains(said), "{text:?}: {refused}");
        }
    }
}
