//! Names of the calls, for metrics.

use super::*;

/// Name of a call; `other` for a kind that is none, so that callers cannot make up names.
pub fn call_name(kind: u16) -> &'static str {
    match kind {
        Heartbeat::KIND => "heartbeat",
        FindGarbage::KIND => "find-garbage",
        ReserveSpace::KIND => "reserve-space",
        FindChunks::KIND => "find-chunks",
        FindReusable::KIND => "find-reusable",
        RegisterChunks::KIND => "register-chunks",
        CommitFile::KIND => "commit-file",
        EndSession::KIND => "end-session",
        Lookup::KIND => "lookup",
        GetNode::KIND => "get-node",
        List::KIND => "list",
        MakeNode::KIND => "make-node",
        Remove::KIND => "remove",
        Rename::KIND => "rename",
        Change::KIND => "change",
        Versions::KIND => "versions",
        ReadMap::KIND => "read-map",
        Locate::KIND => "locate",
        GetStatus::KIND => "status",
        GetCoding::KIND => "get-coding",
        SetCoding::KIND => "set-coding",
        LocatePieces::KIND => "locate-pieces",
        CodeChunks::KIND => "code-chunks",
        RebuildPiece::KIND => "rebuild-piece",
        BeginGroup::KIND => "begin-group",
        CommitGroup::KIND => "commit-group",
        AbandonGroup::KIND => "abandon-group",
        ListGroups::KIND => "list-groups",
        EndJob::KIND => "end-job",
        OrderCopies::KIND => "order-copies",
        PutChunks::KIND => "put-chunks",
        GetChunk::KIND => "get-chunk",
        GetChunks::KIND => "get-chunks",
        FlushChunks::KIND => "flush-chunks",
        CopyChunks::KIND => "copy-chunks",
        RequestHeartbeat::KIND => "request-heartbeat",
        MakeBackup::KIND => "make-backup",
        ReadBackup::KIND => "read-backup",
        PutBackup::KIND => "put-backup",
        _ => "other",
    }
}
