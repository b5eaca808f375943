//! What the protocol asks of a server, answered.
#![forbid(unsafe_code)]
#![expect(
    deprecated,
    reason = "log messages are on their way out of the protocol, and clients still ask for them"
)]

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use rmcp::RoleServer;
use rmcp::handler::server::ServerHandler;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, ErrorData, Implementation,
    ListResourceTemplatesResult, ListResourcesResult, ListToolsResult, LoggingLevel, PaginatedRequestParams,
    ReadResourceRequestParams, ReadResourceResponse, ServerCapabilities, ServerConfig, SetLevelRequestParams,
    Tool,
};
use rmcp::service::RequestContext;

use super::place::{Fault, Home, Link};
use super::resources::templates;
use super::sessions::ASKING;
use super::tools;
use crate::engine::Caller;
use crate::server::AppState;
use crate::server::answer::in_short;
use crate::server::rates::Window;

const INSTRUCTIONS: &str = "\
Runs code in a confined sandbox. All tools of a session share the folder /mnt/data: put files there with upload_file or \
from code, and read them with read_file. Python keeps its variables from call to call; use reset_session to start anew. \
There is no network. Over a transport without sessions, pass the same `session` name with every call.";

/// One connection, or one request that stands alone.
pub(super) struct Handler {
    pub(super) state: AppState,
    pub(super) link: Arc<Link>,
    /// Over HTTP each request brings its own.
    pub(super) local_caller: Option<Caller>,
    /// What the client asked to hear of.
    level: Mutex<Option<LoggingLevel>>,
}

impl Handler {
    /// For the request over HTTP that is being worked on.
    pub(super) fn asked() -> io::Result<Handler> {
        let link = Arc::<Link>::default();
        let state = ASKING.try_with(|asking| {
            asking.note(&link);
            asking.state.clone()
        });
        let state = state.map_err(io::Error::other)?;
        Ok(Handler { state, link, local_caller: None, level: Mutex::default() })
    }

    /// For a client that started this process.
    pub(super) fn local(state: AppState, caller: Caller, home: Home) -> Handler {
        let link = Arc::<Link>::default();
        link.begin(home);
        Handler { state, link, local_caller: Some(caller), level: Mutex::default() }
    }

    /// The level of log messages that a request's client wants to hear; `None`: none at all.
    pub(super) fn log_level(&self, context: &RequestContext<RoleServer>) -> Option<LoggingLevel> {
        let of_connection = *self.level.lock().unwrap_or_else(PoisonError::into_inner);
        context.meta.log_level().or(of_connection)
    }

    /// Languages that can be run here, by their names: all that were found, or all there are before they were looked
    /// for.
    pub(super) fn languages(&self) -> Vec<String> {
        let Some(runs) = self.state.runs() else { return Vec::new() };
        let found = runs.installed_now();
        let there = runs.languages().iter().filter(|it| found.as_ref().is_none_or(|found| found.has(it)));
        there.map(|language| language.id.clone()).collect()
    }

    /// Counts a call where the operator limits how often one user may ask.
    pub(super) fn admit(&self, window: Window, context: &RequestContext<RoleServer>) -> Result<(), Fault> {
        let caller = self.caller(context)?;
        self.state.rates().admit(window, &caller).map_err(|wait| {
            let (noun, seconds) = (window.noun(), wait.as_secs() + 1);
            tracing::info!(noun, seconds, "too many requests");
            Fault(format!("Too many {noun} requests. Please retry in {seconds} seconds."))
        })
    }

    async fn call(
        &self,
        request: CallToolRequestParams,
        context: &RequestContext<RoleServer>,
    ) -> Result<Result<CallToolResult, Fault>, ErrorData> {
        let given = request.arguments;
        Ok(match &*request.name {
            tools::EXECUTE => match tools::arguments(given) {
                Ok(args) => self.execute(args, context).await,
                Err(fault) => Err(fault),
            },
            tools::COMMAND => match tools::arguments(given) {
                Ok(args) => self.command(args, context).await,
                Err(fault) => Err(fault),
            },
            tools::UPLOAD => match tools::arguments(given) {
                Ok(args) => self.upload(args, context).await,
                Err(fault) => Err(fault),
            },
            tools::LIST => match tools::arguments(given) {
                Ok(args) => self.list(args, context).await,
                Err(fault) => Err(fault),
            },
            tools::READ => match tools::arguments(given) {
                Ok(args) => self.read(args, context).await,
                Err(fault) => Err(fault),
            },
            tools::DELETE => match tools::arguments(given) {
                Ok(args) => self.delete(args, context).await,
                Err(fault) => Err(fault),
            },
            tools::RESET => match tools::arguments(given) {
                Ok(args) => self.reset(args, context).await,
                Err(fault) => Err(fault),
            },
            unknown => {
                return Err(ErrorData::invalid_params(
                    in_short(format_args!("Unknown tool: {unknown}")),
                    None,
                ));
            }
        })
    }
}

impl ServerHandler for Handler {
    fn get_info(&self) -> ServerConfig {
        let capabilities =
            ServerCapabilities::builder().enable_logging().enable_resources().enable_tools().build();
        let about = Implementation::new("caisson", env!("CARGO_PKG_VERSION"))
            .with_title("caisson")
            .with_description(env!("CARGO_PKG_DESCRIPTION"));
        ServerConfig::new(capabilities).with_server_info(about).with_instructions(INSTRUCTIONS)
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        if let Some(runs) = self.state.runs() {
            // A model is told once, and shall not be told of what is not there.
            runs.installed().await;
        }
        Ok(ListToolsResult::with_all_items(tools::all(&self.languages())))
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        tools::all(&[]).into_iter().find(|tool| tool.name == name)
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let tool = request.name.clone();
        let result = self.call(request, &context).await?;
        let result = result.unwrap_or_else(|fault| {
            tracing::debug!(%tool, reason = %fault, "a tool was not run");
            CallToolResult::error(vec![ContentBlock::text(fault.0)])
        });
        Ok(result.into())
    }

    async fn list_resources(
        &self,
        page: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        self.resources(page, &context).await
    }

    async fn list_resource_templates(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        Ok(templates())
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        Ok(self.resource(&request.uri, &context).await?.into())
    }

    async fn set_level(
        &self,
        request: SetLevelRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        *self.level.lock().unwrap_or_else(PoisonError::into_inner) = Some(request.level);
        Ok(())
    }
}
