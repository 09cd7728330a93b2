//! `whimbrel token`: manages the tokens of this host's API.

use crate::{
    argument_types::DurationArg,
    context::Context,
    error::CliError,
    output::Removed,
    table::{ago, span, table},
};
use clap::Subcommand;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use whimbrel_api::{Role, TokenInfo, TokenRequest};
use whimbrel_core::RefName;
use whimbrel_wire::RefPatterns;

const EXAMPLES: &str = "\
Examples:
  whimbrel token create alice --role operator > alice.token
  whimbrel token create ci --role operator --machines 'ci-*' --capsules 'golden*' --expires 720h
  whimbrel token ls
  whimbrel token revoke ci
  whimbrel --host https://alpha --token-file alice.token --fingerprint sha256:... ps

Roles:
  viewer    looks at machines, capsules and operations
  operator  also starts, stops, moves, checkpoints and resumes machines, and uses their consoles
  admin     also names files of the host, changes trust and tokens, and decides handovers

The daemon listens for tokens with `whimbrel host --api-listen ADDRESS:PORT`.";

/// Manage the tokens of users elsewhere
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Create a token and print it; it is not shown again
    Create {
        /// Name of the token, for the list and the audit log
        name: RefName,
        /// Role of the holder: viewer, operator or admin
        #[arg(long)]
        role: Role,
        /// Machines in the scope, with * and ?, separated by commas [default: all, or none if --capsules is
        /// given]
        #[arg(long, value_name = "PATTERNS")]
        machines: Option<RefPatterns>,
        /// Tags in the scope [default: all, or none if --machines is given]
        #[arg(long, value_name = "PATTERNS")]
        capsules: Option<RefPatterns>,
        /// Time to the expiry, like 12h [default: never]
        #[arg(long, value_name = "DURATION")]
        expires: Option<DurationArg>,
    },
    /// List the tokens
    Ls,
    /// Revoke a token; what its holder has open ends
    Revoke {
        /// Name of the token
        name: RefName,
    },
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let texts = |list: RefPatterns| list.as_slice().iter().map(ToString::to_string).collect();
        match self.action {
            Action::Create { name, role, machines, capsules, expires } => {
                let request = TokenRequest {
                    name,
                    role,
                    machines: machines.map(texts),
                    capsules: capsules.map(texts),
                    expires_s: expires.map(|expires| expires.0.as_secs()),
                };
                let new = context.client.create_token(&request).await?;
                context.output.result(&new, |new| format!("{}\n", new.token))
            }
            Action::Ls => context.output.result(context.client.tokens().await?.as_slice(), list),
            Action::Revoke { name } => {
                context.client.revoke_token(&name).await?;
                context.output.result(&Removed::one(&name), |removed| removed.sentence("revoked"))
            }
        }
    }
}

fn list(tokens: &[TokenInfo]) -> String {
    let shown = |token: &TokenInfo, list: &Option<Vec<String>>| match list {
        Some(patterns) => patterns.join(","),
        None if token.machines.is_none() && token.capsules.is_none() => "all".to_owned(),
        None => "none".to_owned(),
    };
    let rows = tokens.iter().map(|token| {
        [
            token.name.to_string(),
            token.role.to_string(),
            shown(token, &token.machines),
            shown(token, &token.capsules),
            format!("{} ago", ago(token.created_ms)),
            token.expires_ms.map_or_else(|| "never".to_owned(), expiry),
        ]
    });
    let empty = "no tokens; create one with `whimbrel token create NAME --role ROLE`";
    table(["NAME", "ROLE", "MACHINES", "CAPSULES", "CREATED", "EXPIRES"], rows, empty)
}

/// Formats the time until `end_ms` (since 1970).
fn expiry(end_ms: u64) -> String {
    let end = UNIX_EPOCH + Duration::from_millis(end_ms);
    end.duration_since(SystemTime::now())
        .map_or_else(|_| "expired".to_owned(), |left| format!("in {}", span(left)))
}
