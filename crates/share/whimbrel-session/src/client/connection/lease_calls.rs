//! Calls about leases, which belong to one server session: unlike other calls they are not sent again in the
//! next one.

use super::server_connection::{OpenSession, ServerConnection, send_once};
use crate::proto::{FIRST_WITH_LEASES, Keyed, Watch, WatchCall, Watched};
use bytes::Bytes;
use std::time::Instant;
use whimbrel_wire::{Call, CallError};

/// A renewal of leases that can be sent. It does not keep the connection to the server from ending.
pub(in crate::client) struct Renewal {
    session: OpenSession,
}

impl Renewal {
    /// Sends the renewal; also returns when.
    pub(in crate::client) async fn send(&self, body: Watch) -> Result<(Instant, Watched), CallError> {
        let sent = Instant::now();
        let (watched, _) = send_once::<WatchCall, _>(&self.session, body, Bytes::new(), None).await?;
        Ok((sent, watched))
    }
}

impl ServerConnection {
    /// Waits for a connection, without keeping the one to the server from ending.
    pub(in crate::client) fn connected(&self) -> impl Future<Output = ()> + use<> {
        let mut up = self.subscribe();
        async move {
            // A failure means that the session is over.
            let _ = up.wait_for(Option::is_some).await;
        }
    }

    /// A renewal in the current session; none if there is no connection, or the server knows no leases.
    pub(in crate::client) fn renewal(&self) -> Option<Renewal> {
        let session = self.current_session().filter(|up| up.protocol >= FIRST_WITH_LEASES)?;
        self.count(WatchCall::KIND);
        Some(Renewal { session })
    }

    /// Sends a call in the current session, if there is one.
    pub(in crate::client) async fn lease_call<C, B>(&self, body: B) -> Option<C::Reply>
    where
        C: Call<Header = Keyed<B>>,
    {
        let session = self.current_session()?;
        self.count(C::KIND);
        send_once::<C, B>(&session, body, Bytes::new(), None).await.ok().map(|(reply, _)| reply)
    }
}
